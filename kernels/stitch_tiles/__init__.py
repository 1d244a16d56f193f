"""stitch_tiles: overlapping tiles, as rows of patches, put together to frames, blended in space and time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .reference import stitch_tiles_reference

__all__ = ["Lines", "stitch_tiles", "stitch_tiles_reference"]


@dataclass(frozen=True)
class Lines:
    """Where the lines of one axis come from, [length] each."""

    tiles: int
    size: int
    """Lines of a tile, a multiple of 16."""
    tile: torch.Tensor
    """int32: the last tile that has the line."""
    at: torch.Tensor
    """int32: which line of that tile it is."""
    before: torch.Tensor
    """int32: which line of the tile before."""
    weight: torch.Tensor
    """fp32: of the tile before, from 1 at a tile's first line down to 0 where that one ends."""

    @classmethod
    def of(cls, starts: Sequence[int], size: int, device: torch.device) -> "Lines":
        """An axis of tiles that start at these lines, the last one at its end."""
        first = torch.tensor(starts, dtype=torch.int32, device="cpu")
        line = torch.arange(starts[-1] + size, dtype=torch.int32, device="cpu")
        tile = torch.searchsorted(first, line, right=True, out_int32=True) - 1
        start, start_before = first[tile], first[(tile - 1).clamp_min(0)]
        overlap = (start_before + size - start).clamp_min(1)
        weight = torch.where(tile > 0, 1 - (line - start).float() / overlap, 0.0).clamp_min(0)
        tables = (tile, line - start, line - start_before, weight)
        return cls(len(starts), size, *(table.to(device) for table in tables))


def stitch_tiles(
    tiles: torch.Tensor,
    rows: Lines,
    columns: Lines,
    first: int,
    out: torch.Tensor,
    broken: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write n frames of tiles to `out`: each pixel from the last tile that has it, blended with the tile above, then
    with the tile to the left, both as they are.

    Args:
        tiles: [rows.tiles * columns.tiles, N, 3072] of any float dtype, contiguous. N patches, time slowest, of 3
            colours, 4 frames, 16 rows and 16 columns.
        first: frame of the tiles that is the first of `out`.
        out: [3, n, H, W] of any float dtype, contiguous.
        broken: [1] int32, set to 1 if a value written is NaN or infinity before it is clamped.
        scale, shift: [3] fp32: value * scale + shift, clamped to [0, 1]; None writes values as they are.
        previous: [3, m, H, W]: frames that the first m fade out of, with weights 1, 1 - 1/m, ...

    Raises:
        BackendUnavailable: the named backend cannot take the tiles.
    """
    run = resolve("stitch_tiles", backend, Case.of(tiles))
    run(tiles, rows, columns, first, out, broken, scale, shift, previous)


def _load_triton():
    from .triton_kernel import stitch_tiles_triton

    return stitch_tiles_triton


register(Impl(op="stitch_tiles", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="stitch_tiles", name="reference", rank=100, load=lambda: stitch_tiles_reference))
