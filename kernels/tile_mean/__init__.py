"""tile_mean: fp32 mean of the tokens of each tile. Tiles are scored by their means before sparse attention."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import tile_mean_eager
from .reference import tile_mean_reference

__all__ = ["tile_mean", "tile_mean_eager", "tile_mean_reference"]


def tile_mean(x: torch.Tensor, offsets: torch.Tensor, tile_size: int, *, backend: str = "auto") -> torch.Tensor:
    """Mean over each tile's own tokens.

    Args:
        x: [S, H, D] in tile order, any float dtype, any strides.
        offsets: [N + 1] int32, ascending from 0 to S; tile n is rows offsets[n] to offsets[n + 1], at least one.
        tile_size: most tokens that a tile has.

    Returns:
        [H, N, D] fp32.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    return resolve("tile_mean", backend, Case.of(x, tile_size))(x, offsets, tile_size)


def _load_triton():
    from .triton_kernel import tile_mean_triton

    return tile_mean_triton


register(Impl(op="tile_mean", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="tile_mean", name="eager", rank=50, load=lambda: tile_mean_eager))
register(Impl(op="tile_mean", name="reference", rank=100, load=lambda: tile_mean_reference))
