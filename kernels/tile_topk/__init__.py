"""tile_topk: which tiles each video query tile attends to."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import tile_topk_eager, tile_topk_threshold
from .reference import tile_topk_reference

__all__ = ["tile_topk", "tile_topk_eager", "tile_topk_reference", "tile_topk_threshold"]


def tile_topk(
    scores: torch.Tensor, num_prefix: int, kept: int, mode: str, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tile lists from scores.

    Args:
        scores: [H, V, N] fp32; columns are the P prefix tiles, then the V video tiles. A NaN counts as the best score.
        num_prefix: P.
        kept: k, 1 <= k <= V.
        mode: "exempt" lists every prefix tile and the k best video tiles; "compete" lists the best k + P of all N.

    Returns:
        index [H, V, P + k] int32, ascending global tile numbers, -1 after the count; count [H, V] int32.
        Equal scores: the lower tile.

    Raises:
        ValueError: kept or mode outside what they may be.
        BackendUnavailable: the named backend cannot take scores.
    """
    _check(scores, num_prefix, kept, mode)
    return resolve("tile_topk", backend, Case.of(scores))(scores, num_prefix, kept, mode)


def _check(scores: torch.Tensor, num_prefix: int, kept: int, mode: str) -> None:
    V, N = scores.shape[-2:]
    if num_prefix + V != N:
        raise ValueError(f"tile_topk: scores have {N} columns, expected {num_prefix} prefix + {V} video tiles")
    if not 1 <= kept <= V:
        raise ValueError(f"tile_topk: kept={kept}, expected 1 to {V} video tiles")
    if mode not in ("exempt", "compete"):
        raise ValueError(f"tile_topk: mode={mode!r}, expected 'exempt' or 'compete'")


def _load_triton():
    from .triton_kernel import tile_topk_triton

    return tile_topk_triton


register(Impl(op="tile_topk", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="tile_topk", name="eager", rank=50, load=lambda: tile_topk_eager))
register(Impl(op="tile_topk", name="reference", rank=100, load=lambda: tile_topk_reference))
