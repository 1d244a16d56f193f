"""Encoder of the audio VAE: strided snake convolutions, then one causal attention block that narrows to 32. fp32.

B batch (one channel of sound each), C channels, L samples, n latents.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import CheckpointError
from .audio_decoder import SNAKE_EPS, Conv1d, read_conv
from .tensors import Linear, Norm, Reader

STRIDES = (2, 4, 4, 5, 5)
"""Of the five blocks; 800 samples a latent."""
DILATIONS = (1, 3, 9)
HEADS = 8
EPS = 1e-5


@dataclass(frozen=True)
class Snake:
    """x + sin^2(alpha x) / (alpha + 1e-9)."""

    alpha: torch.Tensor

    def __call__(self, x_BCL: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x_BCL, (x_BCL * self.alpha).sin_().square_(), 1 / (self.alpha + SNAKE_EPS))


@dataclass(frozen=True)
class Residual:
    layers: tuple[Snake | Conv1d, ...]

    def __call__(self, x_BCL: torch.Tensor) -> torch.Tensor:
        y = x_BCL
        for layer in self.layers:
            y = layer(y)
        return y + x_BCL


@dataclass(frozen=True)
class PreBlock:
    """[B, n, C] to [B, n, 32]: proj(norm3 x) + attention(norm1 x), then a gated MLP with its own norm."""

    norm1: Norm
    norm2: Norm
    norm3: Norm
    qkv: Linear
    attention_out: Linear
    proj: Linear
    mlp_norm: Norm
    w0: Linear
    w1: Linear
    w2: Linear

    def __call__(self, x_BnC: torch.Tensor) -> torch.Tensor:
        y = self.proj(_layer_norm(x_BnC, self.norm3)) + self._attention(_layer_norm(x_BnC, self.norm1))
        hidden = _layer_norm(_layer_norm(y, self.norm2), self.mlp_norm)
        return y + self.w2(F.gelu(self.w0(hidden), approximate="tanh") * self.w1(hidden))

    def _attention(self, x_BnC: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x_BnC).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, n, D]
        pooled = F.scaled_dot_product_attention(q, k, v, is_causal=True).mean(dim=1)
        return self.attention_out(F.adaptive_avg_pool1d(pooled, self.attention_out.weight.shape[1]))


@dataclass(frozen=True)
class AudioEncoder:
    layers: tuple[Snake | Conv1d | Residual, ...]
    pre_block: PreBlock
    mean: Conv1d

    def __call__(self, wave_BCL: torch.Tensor) -> torch.Tensor:
        """Waves [B, 1, 800 n] to raw posterior means [B, 32, n]."""
        for layer in self.layers:
            wave_BCL = layer(wave_BCL)
        return self.mean(self.pre_block(wave_BCL.transpose(1, 2)).transpose(1, 2))


def _layer_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, EPS)


def read_encoder(reader: Reader, channels: int) -> AudioEncoder:
    """The encoder from diffusers names with folded weight norm."""
    layers: list[Snake | Conv1d | Residual] = [read_conv(reader, "encoder.block.0", inp=1)]
    width = layers[0].weight.shape[0]
    for index, stride in enumerate(STRIDES, start=1):
        name = f"encoder.block.{index}.block"
        for number, dilation in enumerate(DILATIONS):
            unit = f"{name}.{number}.block"
            layers.append(
                Residual(
                    (
                        _read_snake(reader, f"{unit}.0", width),
                        read_conv(reader, f"{unit}.1", inp=width, out=width, dilation=dilation),
                        _read_snake(reader, f"{unit}.2", width),
                        read_conv(reader, f"{unit}.3", inp=width, out=width),
                    )
                )
            )
        layers.append(_read_snake(reader, f"{name}.3", width))
        layers.append(read_conv(reader, f"{name}.4", inp=width, stride=stride))
        width = layers[-1].weight.shape[0]
    last = len(STRIDES) + 1
    layers.append(_read_snake(reader, f"encoder.block.{last}", width))
    layers.append(read_conv(reader, f"encoder.block.{last + 1}", inp=width))
    width = layers[-1].weight.shape[0]
    if width % HEADS:
        raise CheckpointError(f"{reader.what}: the encoder is {width} wide, not a multiple of {HEADS} attention heads")
    return AudioEncoder(
        layers=tuple(layers),
        pre_block=_read_pre_block(reader, width, channels),
        mean=read_conv(reader, "mean_proj", inp=channels, out=channels),
    )


def _read_snake(reader: Reader, name: str, width: int) -> Snake:
    return Snake(reader.take(f"{name}.alpha", (1, width, 1)))


def _read_pre_block(reader: Reader, width: int, channels: int) -> PreBlock:
    name = "pre_block"
    biases = [reader.take(f"{name}.attn.{part}", (width,)) for part in ("q_bias", "zero_k_bias", "v_bias")]
    w0 = reader.linear(f"{name}.mlp.w0", None, channels, torch.float32)
    return PreBlock(
        norm1=reader.norm(f"{name}.norm1", width),
        norm2=reader.norm(f"{name}.norm2", channels),
        norm3=reader.norm(f"{name}.norm3", width),
        qkv=Linear(reader.take(f"{name}.attn.qkv.weight", (3 * width, width)), torch.cat(biases)),
        attention_out=reader.linear(f"{name}.attn.proj", channels, channels, torch.float32),
        proj=reader.linear(f"{name}.proj", channels, width, torch.float32),
        mlp_norm=reader.norm(f"{name}.mlp.norm", channels),
        w0=w0,
        w1=reader.linear(f"{name}.mlp.w1", w0.weight.shape[0], channels, torch.float32),
        w2=reader.linear(f"{name}.mlp.w2", channels, w0.weight.shape[0], torch.float32),
    )
