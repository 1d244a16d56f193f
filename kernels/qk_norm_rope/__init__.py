"""qk_norm_rope: per-head RMSNorm and partial half-split rotation of queries and keys, in place."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import qk_norm_rope_eager
from .reference import qk_norm_rope_reference

__all__ = ["qk_norm_rope", "qk_norm_rope_eager", "qk_norm_rope_reference"]


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    *,
    backend: str = "auto",
) -> None:
    """Normalise every head, then rotate the pairs (i, i + R), i < R; channels from 2R on are only normalised.

    Args:
        q, k: [S, H, D], last dimension contiguous; usually slices of the fused projection. Overwritten.
        q_weight, k_weight: [D].
        cos, sin: [S, R], 2R <= D, contiguous.

    Raises:
        BackendUnavailable: the named backend cannot take q.
    """
    resolve("qk_norm_rope", backend, Case.of(q))(q, k, q_weight, k_weight, cos, sin, eps)


def _load_triton():
    from .triton_kernel import qk_norm_rope_triton

    return qk_norm_rope_triton


register(Impl(op="qk_norm_rope", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="qk_norm_rope", name="eager", rank=50, load=lambda: qk_norm_rope_eager))
register(Impl(op="qk_norm_rope", name="reference", rank=100, load=lambda: qk_norm_rope_reference))
