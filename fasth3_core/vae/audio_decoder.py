"""Decoder of the audio VAE: BigVGAN with snake activations between x2 resampling filters. fp32.

B batch (one channel of sound each), C channels, L samples.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import CheckpointError
from .tensors import Reader

RATES = (5, 5, 2, 2, 2, 2, 2)
"""Upsampling of the stages, which no tensor tells; their product with the hop's other factors is 800 samples."""
DILATIONS = (1, 3, 5)
FILTER_TAPS = 12
SNAKE_EPS = 1e-9


def kaiser_sinc_filter(ratio: int = 2, taps: int = FILTER_TAPS) -> torch.Tensor:
    """Low-pass [1, 1, taps], sum 1: cut-off .5/ratio, half-width .6/ratio. Used where a file stores no filter."""
    cutoff, half_width, half = 0.5 / ratio, 0.6 / ratio, taps // 2
    attenuation = 2.285 * (half - 1) * math.pi * 4 * half_width + 7.95
    if attenuation > 50:
        beta = 0.1102 * (attenuation - 8.7)
    elif attenuation >= 21:
        beta = 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    else:
        beta = 0.0
    exact = dict(dtype=torch.float32, device="cpu")
    time = torch.arange(-half, half, **exact) + 0.5
    window = torch.kaiser_window(taps, periodic=False, beta=beta, **exact)
    taps_L = 2 * cutoff * window * torch.sinc(2 * cutoff * time)
    return (taps_L / taps_L.sum()).view(1, 1, -1)


@dataclass(frozen=True)
class Conv1d:
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: int = 1
    dilation: int = 1
    padding: int = 0

    def __call__(self, x_BCL: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x_BCL, self.weight, self.bias, self.stride, self.padding, self.dilation)


@dataclass(frozen=True)
class Activation:
    """x2 upsample, SnakeBeta x + sin^2(e^alpha x) / (e^beta + 1e-9), x2 downsample."""

    frequency: torch.Tensor
    """e^alpha [C, 1]."""
    amplitude: torch.Tensor
    """1 / (e^beta + 1e-9) [C, 1]."""
    up: torch.Tensor
    down: torch.Tensor

    def __call__(self, x_BCL: torch.Tensor) -> torch.Tensor:
        C = x_BCL.shape[1]
        # replicated edges reach 5 samples past each end before, 5 and 6 samples after the activation
        x = F.conv_transpose1d(F.pad(x_BCL, (5, 5), mode="replicate"), self.up.expand(C, -1, -1), stride=2, groups=C)
        x = x[..., 15:-15].mul(2)
        x.addcmul_((x * self.frequency).sin_().square_(), self.amplitude)
        return F.conv1d(F.pad(x, (5, 6), mode="replicate"), self.down.expand(C, -1, -1), stride=2, groups=C)


@dataclass(frozen=True)
class AMPBlock:
    """One residual branch a dilation: activation, dilated convolution, activation, convolution."""

    branches: tuple[tuple[Activation, Conv1d, Activation, Conv1d], ...]

    def __call__(self, x_BCL: torch.Tensor) -> torch.Tensor:
        for act1, conv1, act2, conv2 in self.branches:
            x_BCL = conv2(act2(conv1(act1(x_BCL)))) + x_BCL
        return x_BCL


@dataclass(frozen=True)
class Upsample:
    weight: torch.Tensor
    bias: torch.Tensor
    rate: int
    blocks: tuple[AMPBlock, ...]

    def __call__(self, x_BCL: torch.Tensor) -> torch.Tensor:
        padding = (self.weight.shape[-1] - self.rate) // 2
        x = F.conv_transpose1d(x_BCL, self.weight, self.bias, self.rate, padding)
        total = self.blocks[0](x)
        for block in self.blocks[1:]:
            total = total + block(x)
        return total / len(self.blocks)


@dataclass(frozen=True)
class AudioDecoder:
    proj_in: Conv1d
    conv_pre: Conv1d
    stages: tuple[Upsample, ...]
    act_post: Activation
    conv_post: Conv1d

    def __call__(self, latent_BCL: torch.Tensor) -> torch.Tensor:
        """Raw latents [B, 32, A] to waves [B, 1, 800 A], clamped to +-1."""
        x = self.conv_pre(self.proj_in(latent_BCL))
        for stage in self.stages:
            x = stage(x)
        return self.conv_post(self.act_post(x)).clamp_(-1, 1)


def read_decoder(reader: Reader, channels: int) -> AudioDecoder:
    """The decoder from diffusers names with folded weight norm."""
    stages = reader.count("decoder.ups", "0.weight")
    if stages != len(RATES):
        raise CheckpointError(
            f"{reader.what}: {stages} upsampling stages, expected {len(RATES)} (their rates are known for those alone)"
        )
    residuals = reader.count("decoder.resblocks", "convs1.0.weight")
    if residuals % stages or not residuals:
        raise CheckpointError(f"{reader.what}: {residuals} residual blocks do not divide into {stages} stages")
    proj_in = read_conv(reader, "dec_in_proj", inp=channels)
    conv_pre = read_conv(reader, "decoder.conv_pre", inp=proj_in.weight.shape[0])
    width, per_stage, read = conv_pre.weight.shape[0], residuals // stages, []
    for stage, rate in enumerate(RATES):
        weight = reader.take(f"decoder.ups.{stage}.0.weight", (width, None, None))
        width = weight.shape[1]
        bias = reader.take(f"decoder.ups.{stage}.0.bias", (width,))
        blocks = tuple(_read_block(reader, stage * per_stage + j, width) for j in range(per_stage))
        read.append(Upsample(weight, bias, rate, blocks))
    return AudioDecoder(
        proj_in=proj_in,
        conv_pre=conv_pre,
        stages=tuple(read),
        act_post=_read_activation(reader, "decoder.activation_post", width),
        conv_post=read_conv(reader, "decoder.conv_post", inp=width, out=1, bias=False),
    )


def read_conv(
    reader: Reader,
    name: str,
    *,
    inp: int,
    out: int | None = None,
    bias: bool = True,
    stride: int = 1,
    dilation: int = 1,
) -> Conv1d:
    """A convolution that keeps the length ("same" padding), or strides with a kernel of twice the stride."""
    weight = reader.take(f"{name}.weight", (out, inp, None))
    out, _, kernel = weight.shape
    if stride > 1 and kernel != 2 * stride:
        raise CheckpointError(
            f"{reader.what}: {name} has a kernel of {kernel}, expected {2 * stride} at stride {stride}"
        )
    padding = dilation * (kernel - 1) // 2 if stride == 1 else -(-stride // 2)
    return Conv1d(weight, reader.take(f"{name}.bias", (out,)) if bias else None, stride, dilation, padding)


def _read_block(reader: Reader, index: int, width: int) -> AMPBlock:
    name = f"decoder.resblocks.{index}"
    branches = []
    for number, dilation in enumerate(DILATIONS):
        branches.append(
            (
                _read_activation(reader, f"{name}.activations.{2 * number}", width),
                read_conv(reader, f"{name}.convs1.{number}", inp=width, out=width, dilation=dilation),
                _read_activation(reader, f"{name}.activations.{2 * number + 1}", width),
                read_conv(reader, f"{name}.convs2.{number}", inp=width, out=width),
            )
        )
    return AMPBlock(tuple(branches))


def _read_activation(reader: Reader, name: str, width: int) -> Activation:
    return Activation(
        frequency=reader.take(f"{name}.act.alpha", (width,)).exp()[:, None],
        amplitude=(1 / (reader.take(f"{name}.act.beta", (width,)).exp() + SNAKE_EPS))[:, None],
        up=_read_filter(reader, f"{name}.upsample.filter"),
        down=_read_filter(reader, f"{name}.downsample.lowpass.filter"),
    )


def _read_filter(reader: Reader, name: str) -> torch.Tensor:
    if name in reader.tensors:
        return reader.take(name, (1, 1, FILTER_TAPS))
    return kaiser_sinc_filter().to(reader.device)
