"""Tile order: the one encoding of which token is in which tile.

A packed sequence is its prefix segments (text, conditions, audio), then the video grid in raster order. Each prefix
segment is cut into tiles of its own; the video grid is cut into boxes. In tile order the tokens of a tile are adjacent,
so a tile is a range of rows and a ragged tile is a shorter range: there is no padding.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ..config import TILE_SHAPES
from ..errors import GeometryError

PART_SIZE = 64
"""Kernels work on ranges of at most this many tokens; a larger tile is expanded to several."""


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Tile order of one request. Checked when built; tensors are on one device and never change."""

    segments: tuple[int, ...]
    """Tokens of each prefix segment, empty ones left out."""
    grid: tuple[int, int, int]
    """Video tokens along time, height and width."""
    tile_size: int
    sizes: tuple[int, ...]
    """Tokens of each of the P + V tiles."""
    order: torch.Tensor
    """[S] int64: position in tile order -> packed row. Tile order of x is x[order]."""
    inverse: torch.Tensor
    """[S] int64: packed row -> position in tile order."""
    offsets: torch.Tensor
    """[P + V + 1] int32: tile n is positions offsets[n] to offsets[n + 1]."""
    part_offsets: torch.Tensor
    """Like `offsets`, with every tile cut into parts of at most 64 tokens."""
    first_part: torch.Tensor
    """[P + V + 1] int32: tile n is parts first_part[n] to first_part[n + 1]."""
    num_prefix_tiles: int = field(init=False)
    num_video_tiles: int = field(init=False)
    prefix_len: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        prefix_tiles = sum(-(-n // self.tile_size) for n in self.segments)
        object.__setattr__(self, "num_prefix_tiles", prefix_tiles)
        object.__setattr__(self, "num_video_tiles", len(self.sizes) - prefix_tiles)
        object.__setattr__(self, "prefix_len", sum(self.segments))
        object.__setattr__(self, "num_tokens", sum(self.segments) + math.prod(self.grid))

    def tile_sizes(self) -> torch.Tensor:
        """[P + V] int64."""
        return torch.tensor(self.sizes, device=self.order.device)

    def untile_index(self) -> torch.Tensor:
        """[S] int64: packed row -> slot, if every tile occupied `tile_size` slots."""
        tile = torch.repeat_interleave(self.tile_sizes())
        within = torch.arange(self.num_tokens, device=self.order.device) - self.offsets[tile]
        return (tile * self.tile_size + within)[self.inverse]

    def expand(self, index: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tile lists -> the same lists in parts, for kernels that take ranges of at most 64 tokens.

        Args:
            index: [H, V, K] int32 tile lists; count: [H, V] int32.

        Returns:
            index [H, video parts, K * tile_size / 64] int32 and count [H, video parts] int32, of the same form.
        """
        if self.tile_size == PART_SIZE:
            return index, count
        per_tile = self.first_part.diff()
        part = torch.arange(self.tile_size // PART_SIZE, device=index.device, dtype=torch.int32)
        tile = index.clamp(min=0)
        listed = (index >= 0)[..., None] & (part < per_tile[tile][..., None])
        parts = (self.first_part[tile][..., None] + part).masked_fill_(~listed, torch.iinfo(torch.int32).max)
        parts = parts.flatten(2).sort(dim=-1).values
        total = listed.flatten(2).sum(-1, dtype=torch.int32)
        parts.masked_fill_(torch.arange(parts.shape[-1], device=index.device) >= total[..., None], -1)
        num_parts = sum(-(-size // PART_SIZE) for size in self.sizes[self.num_prefix_tiles :])
        of_part = torch.repeat_interleave(per_tile[self.num_prefix_tiles :], output_size=num_parts)
        return parts[:, of_part], total[:, of_part]


def tile_plan(
    segments: tuple[int, ...], grid: tuple[int, int, int], tile_size: int, device: torch.device | str = "cpu"
) -> TilePlan:
    """The plan of a packed sequence; the last ten are kept.

    Args:
        segments: tokens of each prefix segment, in packed order.
        grid: video tokens along time, height and width.
        tile_size: 64, 128 or 256.

    Raises:
        GeometryError: a negative segment, an empty grid, or another tile size.
    """
    return _cached_plan(tuple(segments), tuple(grid), tile_size, torch.device(device))


@lru_cache(maxsize=10)
def _cached_plan(segments, grid, tile_size, device) -> TilePlan:
    if tile_size not in TILE_SHAPES:
        raise GeometryError(f"tile_size={tile_size}: expected one of {sorted(TILE_SHAPES)}; FastH3 was trained at 64.")
    if min(segments, default=0) < 0 or len(grid) != 3 or min(grid) < 1:
        raise GeometryError(f"segments {segments} and video grid {grid}: expected counts >= 0 and three sizes >= 1.")
    segments = tuple(n for n in segments if n)
    prefix_len = sum(segments)
    total = prefix_len + math.prod(grid)
    prefix_sizes = [size for n in segments for size in _cuts(n, tile_size)]
    tile_of_token, video_sizes = _video_tiles(grid, TILE_SHAPES[tile_size])
    sizes = (*prefix_sizes, *video_sizes)
    # the sort is stable, so the tokens of a tile stay in raster order
    video_order = torch.sort(tile_of_token, stable=True).indices
    order = torch.cat([torch.arange(prefix_len, device="cpu"), prefix_len + video_order])
    check_tiles(sizes, order, tile_size, total)
    parts = [_cuts(size, PART_SIZE) for size in sizes]
    return TilePlan(
        segments=segments,
        grid=grid,
        tile_size=tile_size,
        sizes=sizes,
        order=order.to(device),
        inverse=torch.argsort(order).to(device),
        offsets=_running(sizes).to(device),
        part_offsets=_running([size for cut in parts for size in cut]).to(device),
        first_part=_running([len(cut) for cut in parts]).to(device),
    )


def check_tiles(sizes: tuple[int, ...], order: torch.Tensor, tile_size: int, num_tokens: int) -> None:
    """Refuse an encoding that is not a partition of the tokens into tiles of 1 to `tile_size`.

    Raises:
        GeometryError: "tile sizes out of bounds" or "not an injective map", with the numbers.
    """
    if min(sizes) < 1 or max(sizes) > tile_size or sum(sizes) != num_tokens:
        raise GeometryError(
            f"tile sizes out of bounds: {len(sizes)} tiles of {min(sizes)} to {max(sizes)} tokens, {sum(sizes)} in "
            f"all; expected 1 to {tile_size} tokens each and {num_tokens} in all."
        )
    low, high, distinct = order.min().item(), order.max().item(), torch.unique(order).numel()
    if order.numel() != num_tokens or low < 0 or high >= num_tokens or distinct != num_tokens:
        raise GeometryError(
            f"tile order is not an injective map of {num_tokens} tokens: {order.numel()} entries, {distinct} distinct, "
            f"from {low} to {high}."
        )


def _video_tiles(grid, shape) -> tuple[torch.Tensor, list[int]]:
    """Tile number of every token in raster order, and the tokens of each tile; tiles count t, h, w with w fastest."""
    tiles = [-(-n // edge) for n, edge in zip(grid, shape, strict=True)]
    t, h, w = (torch.arange(n, device="cpu") // edge for n, edge in zip(grid, shape, strict=True))
    number = (t[:, None, None] * tiles[1] + h[:, None]) * tiles[2] + w
    return number.flatten(), number.flatten().bincount().tolist()


def _cuts(total: int, size: int) -> list[int]:
    """Full parts, then the remainder."""
    return [min(size, total - start) for start in range(0, total, size)]


def _running(counts) -> torch.Tensor:
    return torch.tensor([0, *counts], device="cpu").cumsum(0, dtype=torch.int32)
