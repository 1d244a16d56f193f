"""Decoder of the video VAE: a ViT over one tile of one clip. Any number of blocks, sizes from the tensors.

Residual stream, norms and scales are fp32; linears and attention run in the dtype of the weights (fp32, fp16 or
bf16), with explicit casts. B tiles, N patches (t slowest, then h, w) plus suffix tokens, C width, H heads, D head dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import CheckpointError, ConfigError
from .tensors import Linear, Norm, Reader
from .tokenwise import add_scaled_, normalise_and_rotate, rms_norm, swiglu_

EPS = 1e-5
PATCH = (3, 4, 16, 16)
"""What one token becomes: colours, frames, rows, columns, the first slowest."""
ROPE_BASE = 100.0
AMBIGUOUS_BLOCKS = 24


@dataclass(frozen=True)
class Block:
    norm1: torch.Tensor
    query_key: Linear
    """Rows of q, then of k; in each head the two channels of a rotation pair are neighbours."""
    value: Linear
    out: Linear
    scale1: torch.Tensor
    norm2: torch.Tensor
    ff_value: Linear
    ff_gate: Linear
    ff_out: Linear
    scale2: torch.Tensor


@dataclass(frozen=True)
class ViTDecoder:
    dtype: torch.dtype
    head_dim: int
    post_quant: Linear
    proj_in: Linear
    suffix: torch.Tensor
    """[registers + 1, C] fp32, the last one all zero."""
    blocks: tuple[Block, ...]
    norm_out: Norm
    proj_out: Linear

    @property
    def latent_channels(self) -> int:
        return self.post_quant.weight.shape[1]

    def rotations(self, grid: tuple[int, int, int], device: torch.device) -> torch.Tensor:
        """Complex [N + suffix, 1, D/2] of a clip's (t, h, w): coordinate 2(i + .5)/n - 1 on each axis, 0 for the
        suffix. An eighth of the head dim in frequencies per axis; the last quarter of a head does not rotate."""
        count = self.head_dim // 8
        frequencies = ROPE_BASE ** (-torch.arange(count, dtype=torch.float32, device=device) / count)
        angles = torch.zeros(*grid, self.head_dim // 2, dtype=torch.float32, device=device)
        for axis, size in enumerate(grid):
            coordinate = 2 * (torch.arange(size, dtype=torch.float32, device=device) + 0.5) / size - 1
            along = (2 * math.pi * coordinate[:, None] * frequencies).view(-1, *[1] * (2 - axis), count)
            angles[..., axis * count : (axis + 1) * count] = along
        angles = F.pad(angles.flatten(0, 2), (0, 0, 0, self.suffix.shape[0]))
        return torch.polar(torch.ones_like(angles), angles)[:, None]

    def __call__(self, latents_BTHWC: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Raw latents [B, t, h, w, 24] to ImageNet-normalised pixels [B, 3, 4t, 16h, 16w] in the weights' dtype."""
        B, t, h, w, _ = latents_BTHWC.shape
        patches = self.proj_in(self.post_quant(latents_BTHWC.to(self.dtype))).float().flatten(1, 3)
        x_BNC = torch.cat([patches, self.suffix.expand(B, -1, -1)], dim=1)
        for block in self.blocks:
            self._attention(x_BNC, block, rotations)
            self._feed_forward(x_BNC, block)
        x_BNC = x_BNC[:, : t * h * w]
        out = F.layer_norm(x_BNC, x_BNC.shape[-1:], self.norm_out.weight, self.norm_out.bias, EPS)
        pixels = self.proj_out(out.to(self.dtype)).view(B, t, h, w, *PATCH)
        return pixels.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(B, PATCH[0], t * PATCH[1], h * PATCH[2], w * PATCH[3])

    def _attention(self, x_BNC: torch.Tensor, block: Block, rotations: torch.Tensor) -> None:
        B, N, _ = x_BNC.shape
        normed = rms_norm(x_BNC, block.norm1, EPS, self.dtype)
        qk = block.query_key(normed).view(B, N, -1, self.head_dim)
        value = block.value(normed).view(B, N, -1, self.head_dim)
        query, key = normalise_and_rotate(qk, rotations, EPS).chunk(2, dim=2)
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        add_scaled_(x_BNC, block.out(attended.transpose(1, 2).flatten(2)), block.scale1)

    def _feed_forward(self, x_BNC: torch.Tensor, block: Block) -> None:
        normed = rms_norm(x_BNC, block.norm2, EPS, self.dtype)
        # two products instead of one of double width: both halves stay contiguous, and work in place
        hidden = swiglu_(block.ff_gate(normed), block.ff_value(normed))
        add_scaled_(x_BNC, block.ff_out(hidden), block.scale2)


def read_decoder(reader: Reader, dtype: torch.dtype, head_dim: int) -> ViTDecoder:
    """The decoder from diffusers names. Raises CheckpointError on a missing, misshapen or foreign tensor."""
    depth = reader.count("decoder.transformer_blocks", "scale1")
    if depth == 0:
        raise CheckpointError(f"{reader.what}: no decoder.transformer_blocks.0.scale1: not an H3 ViT decoder")
    if depth == AMBIGUOUS_BLOCKS:
        raise CheckpointError(
            f"{reader.what}: a decoder of {depth} blocks is either Sol-H3-VAE (whole frames, windowed attention) or "
            "the causal StreamRender decoder. Their tensors have the same names and shapes and their attention "
            "differs, so the file cannot say how to decode. Use the released decoder (36 blocks) or a distilled one "
            "of its plan (26 or 12 blocks)."
        )
    width, channels = reader.shape("decoder.proj_in.weight")
    if head_dim < 8 or head_dim % 8 or width % head_dim:
        raise ConfigError("head_dim", head_dim, f"a multiple of 8 that divides the width {width}", "Released: 64.")
    post_quant = reader.take("post_quant_conv.weight", (channels, channels, 1, 1, 1), dtype).flatten(1)
    registers = reader.take("decoder.register_tokens", (1, None, width))[0]
    decoder = ViTDecoder(
        dtype=dtype,
        head_dim=head_dim,
        post_quant=Linear(post_quant, reader.take("post_quant_conv.bias", (channels,), dtype)),
        proj_in=reader.linear("decoder.proj_in", width, channels, dtype),
        suffix=F.pad(registers, (0, 0, 0, 1)),
        blocks=tuple(_read_block(reader, i, width, head_dim, dtype) for i in range(depth)),
        norm_out=reader.norm("decoder.norm_out", width),
        proj_out=reader.linear("decoder.proj_out", math.prod(PATCH), width, dtype),
    )
    reader.refuse_leftovers("decoder.transformer_blocks.")
    return decoder


def _read_block(reader: Reader, index: int, width: int, head_dim: int, dtype: torch.dtype) -> Block:
    name = f"decoder.transformer_blocks.{index}"
    query, key = (reader.linear(f"{name}.attn.to_{part}", width, width, dtype) for part in "qk")
    order = _pairs_together(width, head_dim, reader.device)
    hidden, _ = reader.shape(f"{name}.ff.net.2.weight")[::-1]
    value_gate = reader.linear(f"{name}.ff.net.0.proj", 2 * hidden, width, dtype)
    return Block(
        norm1=reader.take(f"{name}.norm1.weight", (width,)),
        query_key=Linear(
            torch.cat([query.weight[order], key.weight[order]]), torch.cat([query.bias[order], key.bias[order]])
        ),
        value=reader.linear(f"{name}.attn.to_v", width, width, dtype),
        out=reader.linear(f"{name}.attn.to_out.0", width, width, dtype),
        scale1=reader.take(f"{name}.scale1", (width,)),
        norm2=reader.take(f"{name}.norm2.weight", (width,)),
        ff_value=Linear(value_gate.weight[:hidden], value_gate.bias[:hidden]),
        ff_gate=Linear(value_gate.weight[hidden:], value_gate.bias[hidden:]),
        ff_out=reader.linear(f"{name}.ff.net.2", width, hidden, dtype),
        scale2=reader.take(f"{name}.scale2", (width,)),
    )


def _pairs_together(width: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Row order of q and k that puts the rotation pairs (i, i + 3D/8) of every head side by side.

    Scores do not change under a common order of both, and a pair becomes one complex number.
    """
    half = 3 * head_dim // 8
    pairs = torch.arange(2 * half, device=device).view(2, half).T.flatten()
    head = torch.cat([pairs, torch.arange(2 * half, head_dim, device=device)])
    return (torch.arange(0, width, head_dim, device=device)[:, None] + head).flatten()
