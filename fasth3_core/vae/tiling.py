"""Spatial tiles of the video VAE: 256 pixels with 64 or more of overlap. Part of the trained function, no option.

The decoder normalises positions by the size of a tile, so any other tile size gives another picture; speed comes
from decoding several tiles at once. C channels, F frames, H rows, W columns.
"""

from dataclasses import dataclass
from functools import cache

import torch

from ..errors import GeometryError
from ..packing.geometry import LATENT_PIXELS

TILE = 256
MIN_OVERLAP = 64
STEP = LATENT_PIXELS
"""Sizes, starts and overlaps are multiples of it."""


@dataclass(frozen=True)
class Axis:
    """The tiles along one axis. Tile i covers starts[i] ... starts[i] + size, and keeps starts[i] ... ends[i]."""

    length: int
    size: int
    starts: tuple[int, ...]

    @property
    def overlaps(self) -> tuple[int, ...]:
        """overlaps[i] is shared by tiles i and i + 1."""
        return tuple(a + self.size - b for a, b in zip(self.starts, self.starts[1:], strict=False))

    @property
    def ends(self) -> tuple[int, ...]:
        return (*self.starts[1:], self.length)

    def tile(self, index: int) -> slice:
        return slice(self.starts[index], self.starts[index] + self.size)

    def in_latents(self) -> "Axis":
        return Axis(self.length // STEP, self.size // STEP, tuple(start // STEP for start in self.starts))


@cache
def axis_tiles(length: int) -> Axis:
    """Tiles along an axis of `length` pixels, a multiple of 16. The surplus of the last tile widens the overlaps
    by 16 pixels each, round-robin from the first."""
    if length < STEP or length % STEP:
        raise GeometryError(f"a side of {length} pixels: the video VAE takes multiples of {STEP}")
    if length <= TILE:
        return Axis(length, length, (0,))
    tiles = -(-length // TILE)
    while TILE * tiles - MIN_OVERLAP * (tiles - 1) < length:
        tiles += 1
    steps, gaps = (TILE * tiles - MIN_OVERLAP * (tiles - 1) - length) // STEP, tiles - 1
    starts = [0]
    for gap in range(gaps):
        overlap = MIN_OVERLAP + STEP * (steps // gaps + (gap < steps % gaps))
        starts.append(starts[-1] + TILE - overlap)
    return Axis(length, TILE, tuple(starts))


class Stitcher:
    """Puts tiles onto a canvas [C, F, H, W] in raster order, blending each with its upper, then its left neighbour.

    The neighbours enter as they came out of the network, neither blended nor trimmed: that is what the released
    pipeline does, and blending against blended neighbours differs where four tiles meet. Weights of the new tile
    rise linearly from 0 at the first line of the overlap.
    """

    def __init__(self, rows: Axis, columns: Axis, canvas_CFHW: torch.Tensor):
        self.rows, self.columns, self.canvas = rows, columns, canvas_CFHW
        self._down = [_neighbour_weights(overlap, canvas_CFHW)[:, None] for overlap in rows.overlaps]
        self._right = [_neighbour_weights(overlap, canvas_CFHW) for overlap in columns.overlaps]
        self._raw: dict[tuple[int, int], torch.Tensor] = {}

    def place(self, row: int, column: int, tile_CFHW: torch.Tensor) -> None:
        """Write one tile. It is kept as it is until its lower and right neighbours are placed."""
        top, left = self.rows.starts[row], self.columns.starts[column]
        kept = self.canvas[..., top : self.rows.ends[row], left : self.columns.ends[column]]
        height, width = kept.shape[-2:]
        kept.copy_(tile_CFHW[..., :height, :width])
        if row:
            overlap = self.rows.overlaps[row - 1]
            lines = min(overlap, height)
            above = self._raw.pop((row - 1, column))[..., self.rows.size - overlap :, :width]
            kept[..., :lines, :].lerp_(above[..., :lines, :], self._down[row - 1][:lines])
        if column:
            overlap = self.columns.overlaps[column - 1]
            lines = min(overlap, width)
            beside = self._raw[row, column - 1][..., :height, self.columns.size - overlap :]
            kept[..., :lines].lerp_(beside[..., :lines], self._right[column - 1][:lines])
        self._raw[row, column] = tile_CFHW


def _neighbour_weights(overlap: int, like: torch.Tensor) -> torch.Tensor:
    return (1 - torch.arange(overlap, dtype=torch.float32, device=like.device) / overlap).to(like.dtype)
