"""coarse_branch: the gated compression branch of VSA, attention between tile means."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import coarse_branch_eager
from .reference import coarse_branch_reference

__all__ = ["coarse_branch", "coarse_branch_eager", "coarse_branch_reference"]


def coarse_branch(
    out: torch.Tensor,
    scores: torch.Tensor,
    v_mean: torch.Tensor,
    gate: torch.Tensor,
    offsets: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Add gate * (softmax(scores) @ v_mean) to `out`, in place, one coarse vector for all tokens of a query tile.

    The softmax runs over all N tiles: prefix included, not weighted by tile size, independent of any selection.

    Args:
        out: [S, H, D] in tile order. Overwritten.
        scores: [H, N, N] fp32, query tiles by key tiles, scaled.
        v_mean: [H, N, D] fp32.
        gate: [S, H, D], any strides.
        offsets: [N + 1] int32 tile ranges.

    Returns:
        out. The coarse vectors are rounded to its dtype before the product.

    Raises:
        BackendUnavailable: the named backend cannot take `out`.
    """
    return resolve("coarse_branch", backend, Case.of(out))(out, scores, v_mean, gate, offsets)


def _load_triton():
    from .triton_kernel import coarse_branch_triton

    return coarse_branch_triton


register(Impl(op="coarse_branch", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="coarse_branch", name="eager", rank=50, load=lambda: coarse_branch_eager))
register(Impl(op="coarse_branch", name="reference", rank=100, load=lambda: coarse_branch_reference))
