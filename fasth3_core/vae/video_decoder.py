"""Decoder of the video VAE: a ViT over one tile of one clip. Any number of blocks, sizes from the tensors.

Residual stream, norms and scales are fp32; products and attention run in the dtype of the weights (fp32, fp16 or
bf16), with explicit casts. Tiles are rows: all but attention works on one matrix of S = B * N tokens. B tiles,
N patches (t slowest, then h, w) plus suffix tokens, C width, H heads, D head dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import CheckpointError, ConfigError
from .block_ops import BlockOps
from .decoder_weights import Block, read_block
from .tensors import Linear, Norm, Reader
from .windows import Group, WindowOptions, groups, window_coordinates

EPS = 1e-5
PATCH = (3, 4, 16, 16)
"""What one token becomes: colours, frames, rows, columns, the first slowest."""
ROPE_BASE = 100.0
AMBIGUOUS_BLOCKS = 24

Attend = Callable[[int, torch.Tensor, torch.Tensor | None, BlockOps], torch.Tensor]
"""(layer, heads of the fused product [S, 3H, D], its bias [3H, D] where it lacks it, ops) -> [S, H * D]."""


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
        axes = [2 * (torch.arange(size, dtype=torch.float32, device="cpu") + 0.5) / size - 1 for size in grid]
        return self.turns(axes, 0.0, device)

    def turns(self, axes: Sequence[torch.Tensor], suffix_time: float, device: torch.device) -> torch.Tensor:
        """Rotations of a grid from the coordinates along its axes, and of the suffix at a time and the middle."""
        count = self.head_dim // 8
        frequencies = ROPE_BASE ** (-torch.arange(count, dtype=torch.float32, device=device) / count)
        angles = torch.zeros(*map(len, axes), self.head_dim // 2, dtype=torch.float32, device=device)
        for axis, coordinate in enumerate(axes):
            along = (2 * math.pi * coordinate.to(device)[:, None] * frequencies).view(-1, *[1] * (2 - axis), count)
            angles[..., axis * count : (axis + 1) * count] = along
        angles = F.pad(angles.flatten(0, 2), (0, 0, 0, self.suffix.shape[0]))
        angles[-self.suffix.shape[0] :, :count] = 2 * math.pi * suffix_time * frequencies
        return torch.polar(torch.ones_like(angles), angles)

    def __call__(self, latents_BTHWC: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Raw latents [B, t, h, w, 24] to ImageNet-normalised patches [B, t * h * w, 3 * 4 * 16 * 16] in the weights'
        dtype."""

        def attend(layer: int, heads_SHD: torch.Tensor, bias_HD: torch.Tensor | None, ops: BlockOps) -> torch.Tensor:
            query, key, value = turned(heads_SHD, bias_HD, rotations, ops)
            return ops.bounded_attention(query, key, value, rotations.shape[0])

        return self._transform(latents_BTHWC, attend)

    def whole_frames(
        self, latents_THWC: torch.Tensor, times: torch.Tensor, suffix_time: float, options: WindowOptions
    ) -> torch.Tensor:
        """Raw latents [t, h, w, 24] of any size by windows, to pixels [3, 4t, 16h, 16w]. Times as of `coordinates`."""
        grid, device = latents_THWC.shape[:3], latents_THWC.device
        shifts = {options.layer_shift(layer) for layer in range(len(self.blocks))}
        plans = {}
        for shift in shifts:
            axes = [times, *(window_coordinates(size, shift) for size in grid[1:])]
            windows = groups(tuple(grid), shift, self.suffix.shape[0], device)
            plans[shift] = (self.turns(axes, suffix_time, device), windows)

        def attend(layer: int, heads_SHD: torch.Tensor, bias_HD: torch.Tensor | None, ops: BlockOps) -> torch.Tensor:
            rotations, windows = plans[options.layer_shift(layer)]
            return window_attention(*turned(heads_SHD, bias_HD, rotations, ops), windows)

        return as_frames(self._transform(latents_THWC[None], attend)[0], tuple(grid))

    def _transform(self, latents_BTHWC: torch.Tensor, attend: Attend) -> torch.Tensor:
        B, t, h, w, _ = latents_BTHWC.shape
        ops = BlockOps.choose(latents_BTHWC.device, self.dtype, self.head_dim, self.form)
        patches = self.proj_in(self.post_quant(latents_BTHWC.to(self.dtype))).float().flatten(1, 3)
        x_SC = torch.cat([patches, self.suffix.expand(B, -1, -1)], dim=1).flatten(0, 1)
        normed = ops.residual_rms(x_SC, None, None, None, self.blocks[0].norm1, EPS, self.dtype, self.form)
        for layer, block in enumerate(self.blocks):
            projected, bias = ops.project(normed, block.qkv)
            heads_SHD = projected.unflatten(-1, (-1, self.head_dim))
            bias_HD = None if bias is None else bias.view(-1, self.head_dim)
            y_SC, bias = ops.project(ops.rows(attend(layer, heads_SHD, bias_HD, ops)), block.out)
            normed = ops.residual_rms(x_SC, y_SC, block.scale1, bias, block.norm2, EPS, self.dtype, self.form)
            y_SC, bias = ops.feed_forward(normed, block.ff_in, block.ff_out)
            if layer + 1 < len(self.blocks):
                weight = self.blocks[layer + 1].norm1
                normed = ops.residual_rms(x_SC, y_SC, block.scale2, bias, weight, EPS, self.dtype, self.form)
            else:
                x_SC.addcmul_(y_SC if bias is None else y_SC + bias, block.scale2)
        x_BNC = x_SC.view(B, -1, x_SC.shape[1])[:, : t * h * w]
        out = F.layer_norm(x_BNC, x_BNC.shape[-1:], self.norm_out.weight, self.norm_out.bias, EPS)
        return self.proj_out(out.to(self.dtype))


def as_frames(patches_NP: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """[3, 4t, 16h, 16w] of the patches of a (t, h, w) grid."""
    t, h, w = grid
    pixels = patches_NP.view(t, h, w, *PATCH).permute(3, 0, 4, 1, 5, 2, 6)
    return pixels.reshape(PATCH[0], t * PATCH[1], h * PATCH[2], w * PATCH[3])


def turned(
    heads_SHD: torch.Tensor, bias_HD: torch.Tensor | None, rotations: torch.Tensor, ops: BlockOps
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys (normalised and rotated, in place) and values [S, H, D] of a fused product; the bias is theirs."""
    H = heads_SHD.shape[1] // 3
    ops.head_norm_rope(heads_SHD[:, : 2 * H], None if bias_HD is None else bias_HD[: 2 * H], rotations, EPS)
    return heads_SHD.unflatten(1, (3, H)).unbind(1)


def window_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, windows: tuple[Group, ...]
) -> torch.Tensor:
    """Tokens attend to their window and the suffix, the suffix to everything: [S, H, D] each, to [S, H * D]."""
    out = torch.empty_like(query)
    suffix = windows[0].keys.shape[1] - windows[0].queries.shape[1]
    for group in windows:
        inside = (query[group.queries], key[group.keys], value[group.keys])
        attended = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inside))
        out[group.queries] = attended.transpose(1, 2)
    whole = [x.transpose(0, 1)[None] for x in (query[-suffix:], key, value)]
    out[-suffix:] = F.scaled_dot_product_attention(*whole)[0].transpose(0, 1)
    return out.flatten(1)


def read_decoder(
    reader: Reader, dtype: torch.dtype, head_dim: int, form: str = "", *, windows: bool = False
) -> ViTDecoder:
    """The decoder from diffusers names.

    Args:
        dtype: of products, but for operands in 8 bits.
        form: of quantise_rows, to quantise the blocks' weights here; "" leaves them as the file has them.
        windows: whether it will decode whole frames, for which 24 blocks are not ambiguous.

    Raises CheckpointError on a missing, misshapen or foreign tensor.
    """
    depth = reader.count("decoder.transformer_blocks", "scale1")
    if depth == 0:
        raise CheckpointError(f"{reader.what}: no decoder.transformer_blocks.0.scale1: not an H3 ViT decoder")
    if depth == AMBIGUOUS_BLOCKS and not windows:
        raise CheckpointError(
            f"{reader.what}: a decoder of {depth} blocks is either Sol-H3-VAE (whole frames, windowed attention) or "
            "the causal StreamRender decoder. Their tensors have the same names and shapes and their attention "
            "differs, so the file cannot say how to decode. The command probe-decoder finds out by comparing it with "
            "the released decoder (36 blocks) and remembers; or use that one, or a distilled one of its plan (26, 12, "
            "8 blocks)."
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
