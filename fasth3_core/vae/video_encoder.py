"""Encoder of the video VAE: a causal 3-D CNN over one tile of one clip, always fp32.

Convolutions reflect in space and see zeros before the first frame; group norms take their statistics per frame.
B batch (1), C channels, T frames, H rows, W columns.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import CheckpointError
from .tensors import Norm, Reader

GROUPS = 32
EPS = 1e-6
STRIDES = ((1, 2), (2, 2), (2, 2), (1, 2))
"""(time, space) of the downsamplers, which no tensor tells: 16 in space, 4 in time."""
LOGVAR_RANGE = (-30.0, 20.0)


@dataclass(frozen=True)
class Conv:
    weight: torch.Tensor
    bias: torch.Tensor
    stride: tuple[int, int] = (1, 1)

    def __call__(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        """Kernel 1: plain. Kernel 3: zeros for two frames in front; in space one reflected line all around, or at
        the right and bottom only when striding."""
        time, space = self.stride
        if self.weight.shape[-1] == 3:
            before = 1 if space == 1 else 0
            x_BCTHW = F.pad(x_BCTHW, (before, 1, before, 1, 0, 0), mode="reflect")
            x_BCTHW = F.pad(x_BCTHW, (0, 0, 0, 0, 2, 0))
        return F.conv3d(x_BCTHW, self.weight, self.bias, stride=(time, space, space))


@dataclass(frozen=True)
class Resnet:
    norm1: Norm
    conv1: Conv
    norm2: Norm
    conv2: Conv
    shortcut: Conv | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv2(norm_silu(self.conv1(norm_silu(x, self.norm1)), self.norm2))
        return hidden.add_(x if self.shortcut is None else self.shortcut(x))


@dataclass(frozen=True)
class VideoEncoder:
    conv_in: Conv
    stages: tuple[tuple[Resnet | Conv, ...], ...]
    norm_out: Norm
    conv_out: Conv
    quant: Conv

    @property
    def latent_channels(self) -> int:
        return self.quant.weight.shape[0] // 2

    def __call__(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        """ImageNet-normalised pixels [1, 3, T, H, W] fp32 to moments [1, 48, t, H/16, W/16]: mean, then logvar."""
        x = self.conv_in(x_BCTHW)
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return self.quant(self.conv_out(norm_silu(x, self.norm_out)))


def norm_silu(x_BCTHW: torch.Tensor, norm: Norm) -> torch.Tensor:
    frames = x_BCTHW.transpose(1, 2).flatten(0, 1)
    frames = F.silu(F.group_norm(frames, GROUPS, norm.weight, norm.bias, EPS), inplace=True)
    return frames.unflatten(0, (x_BCTHW.shape[0], -1)).transpose(1, 2)


def read_encoder(reader: Reader) -> VideoEncoder:
    """The encoder from diffusers names. Raises CheckpointError on a missing, misshapen or foreign tensor."""
    stages = reader.count("encoder.down_blocks", "resnets.0.conv1.weight")
    strided = reader.count("encoder.down_blocks", "downsamplers.0.conv.weight")
    if strided != len(STRIDES):
        raise CheckpointError(
            f"{reader.what}: the encoder has {strided} downsamplers in {stages} stages, expected {len(STRIDES)} "
            "(their strides are known for the released plan alone)"
        )
    conv_in = _read_conv(reader, "encoder.conv_in", inp=3, kernel=3)
    channels = conv_in.weight.shape[0]
    layers = []
    for index in range(stages):
        stage, channels = _read_stage(reader, index, channels)
        layers.append(stage)
    moments = reader.shape("quant_conv.weight")[0]
    encoder = VideoEncoder(
        conv_in=conv_in,
        stages=tuple(layers),
        norm_out=reader.norm("encoder.norm_out", channels),
        conv_out=_read_conv(reader, "encoder.conv_out", inp=channels, out=moments, kernel=3),
        quant=_read_conv(reader, "quant_conv", inp=moments, out=moments, kernel=1),
    )
    reader.refuse_leftovers("encoder.down_blocks.")
    return encoder


def _read_stage(reader: Reader, index: int, channels: int) -> tuple[tuple[Resnet | Conv, ...], int]:
    name = f"encoder.down_blocks.{index}"
    layers: list[Resnet | Conv] = []
    for number in range(reader.count(f"{name}.resnets", "conv1.weight")):
        inp, resnet = channels, f"{name}.resnets.{number}"
        conv1 = _read_conv(reader, f"{resnet}.conv1", inp=inp, kernel=3)
        channels = conv1.weight.shape[0]
        if inp % GROUPS or channels % GROUPS:
            raise CheckpointError(
                f"{reader.what}: {resnet} has {inp} and {channels} channels, not multiples of {GROUPS}"
            )
        layers.append(
            Resnet(
                norm1=reader.norm(f"{resnet}.norm1", inp),
                conv1=conv1,
                norm2=reader.norm(f"{resnet}.norm2", channels),
                conv2=_read_conv(reader, f"{resnet}.conv2", inp=channels, out=channels, kernel=3),
                shortcut=None
                if inp == channels
                else _read_conv(reader, f"{resnet}.conv_shortcut", inp=inp, out=channels, kernel=1),
            )
        )
    if index < len(STRIDES):
        down = _read_conv(reader, f"{name}.downsamplers.0.conv", inp=channels, kernel=3, stride=STRIDES[index])
        channels = down.weight.shape[0]
        layers.append(down)
    return tuple(layers), channels


def _read_conv(
    reader: Reader, name: str, *, inp: int, kernel: int, out: int | None = None, stride: tuple[int, int] = (1, 1)
) -> Conv:
    weight = reader.take(f"{name}.weight", (out, inp, kernel, kernel, kernel))
    return Conv(weight, reader.take(f"{name}.bias", (weight.shape[0],)), stride)
