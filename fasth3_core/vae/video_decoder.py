"""Decoder of the video VAE: a ViT over one tile of one clip. Any number of blocks, sizes from the tensors.

Residual stream, norms and scales are fp32; products and attention run in the dtype of the weights (fp32, fp16 or
bf16), with explicit casts. Tiles are rows: all but attention works on one matrix of S = B * N tokens. B tiles,
N patches (t slowest, then h, w) plus suffix tokens, C width, H heads, D head dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import CheckpointError, ConfigError
from .block_ops import BlockOps, Rows
from .decoder_weights import Block, read_block
from .tensors import Linear, Norm, Reader

EPS = 1e-5
PATCH = (3, 4, 16, 16)
"""What one token becomes: colours, frames, rows, columns, the first slowest."""
ROPE_BASE = 100.0
AMBIGUOUS_BLOCKS = 24


@dataclass(frozen=True)
class ViTDecoder:
    dtype: torch.dtype
    form: str
    """Of the operands of the blocks' products: "" for `dtype`, or a form of quantise_rows."""
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
        """Complex [N + suffix, D/2] of a clip's (t, h, w): coordinate 2(i + .5)/n - 1 on each axis, 0 for the
        suffix. An eighth of the head dim in frequencies per axis; the last quarter of a head does not rotate."""
        count = self.head_dim // 8
        frequencies = ROPE_BASE ** (-torch.arange(count, dtype=torch.float32, device=device) / count)
        angles = torch.zeros(*grid, self.head_dim // 2, dtype=torch.float32, device=device)
        for axis, size in enumerate(grid):
            coordinate = 2 * (torch.arange(size, dtype=torch.float32, device=device) + 0.5) / size - 1
            along = (2 * math.pi * coordinate[:, None] * frequencies).view(-1, *[1] * (2 - axis), count)
            angles[..., axis * count : (axis + 1) * count] = along
        angles = F.pad(angles.flatten(0, 2), (0, 0, 0, self.suffix.shape[0]))
        return torch.polar(torch.ones_like(angles), angles)

    def __call__(self, latents_BTHWC: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Raw latents [B, t, h, w, 24] to ImageNet-normalised pixels [B, 3, 4t, 16h, 16w] in the weights' dtype."""
        B, t, h, w, _ = latents_BTHWC.shape
        ops = BlockOps.choose(latents_BTHWC.device, self.dtype, self.head_dim, self.form)
        patches = self.proj_in(self.post_quant(latents_BTHWC.to(self.dtype))).float().flatten(1, 3)
        x_SC = torch.cat([patches, self.suffix.expand(B, -1, -1)], dim=1).flatten(0, 1)
        normed = ops.residual_rms(x_SC, None, None, None, self.blocks[0].norm1, EPS, self.dtype, self.form)
        for block, following in zip(self.blocks, self.blocks[1:], strict=False):
            hidden = self._branches(x_SC, normed, block, rotations, ops)
            y_SC, bias = ops.project(hidden, block.ff_out)
            normed = ops.residual_rms(x_SC, y_SC, block.scale2, bias, following.norm1, EPS, self.dtype, self.form)
        last = self.blocks[-1]
        x_SC.addcmul_(ops.whole(self._branches(x_SC, normed, last, rotations, ops), last.ff_out), last.scale2)
        x_BNC = x_SC.view(B, -1, x_SC.shape[1])[:, : t * h * w]
        out = F.layer_norm(x_BNC, x_BNC.shape[-1:], self.norm_out.weight, self.norm_out.bias, EPS)
        pixels = self.proj_out(out.to(self.dtype)).view(B, t, h, w, *PATCH)
        return pixels.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(B, PATCH[0], t * PATCH[1], h * PATCH[2], w * PATCH[3])

    def _branches(
        self, x_SC: torch.Tensor, normed: Rows, block: Block, rotations: torch.Tensor, ops: BlockOps
    ) -> Rows:
        """Attention into the residual; then the feed-forward up to its hidden [S, F], which `ff_out` projects."""
        y_SC, bias = ops.project(ops.rows(self._attention(normed, block.qkv, rotations, ops)), block.out)
        normed = ops.residual_rms(x_SC, y_SC, block.scale1, bias, block.norm2, EPS, self.dtype, self.form)
        return ops.feed_forward_hidden(normed, block.ff_in)

    def _attention(self, normed: Rows, qkv: Linear, rotations: torch.Tensor, ops: BlockOps) -> torch.Tensor:
        projected, bias = ops.project(normed, qkv)
        heads_SHD = projected.unflatten(-1, (-1, self.head_dim))
        H = heads_SHD.shape[1] // 3
        bias_HD = None if bias is None else bias.view(-1, self.head_dim)[: 2 * H]
        ops.head_norm_rope(heads_SHD[:, : 2 * H], bias_HD, rotations, EPS)
        return ops.bounded_attention(*heads_SHD.unflatten(1, (3, H)).unbind(1), rotations.shape[0])


def read_decoder(reader: Reader, dtype: torch.dtype, head_dim: int, form: str = "") -> ViTDecoder:
    """The decoder from diffusers names.

    Args:
        dtype: of products, but for operands in 8 bits.
        form: of quantise_rows, to quantise the blocks' weights here; "" leaves them as the file has them.

    Raises CheckpointError on a missing, misshapen or foreign tensor.
    """
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
        form=form,
        head_dim=head_dim,
        post_quant=Linear(post_quant, reader.take("post_quant_conv.bias", (channels,), dtype)),
        proj_in=reader.linear("decoder.proj_in", width, channels, dtype),
        suffix=F.pad(registers, (0, 0, 0, 1)),
        blocks=tuple(read_block(reader, i, width, head_dim, dtype, form) for i in range(depth)),
        norm_out=reader.norm("decoder.norm_out", width),
        proj_out=reader.linear("decoder.proj_out", math.prod(PATCH), width, dtype),
    )
    reader.refuse_leftovers("decoder.transformer_blocks.")
    return decoder
