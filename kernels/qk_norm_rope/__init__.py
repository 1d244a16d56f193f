"""qk_norm_rope: per-head RMSNorm and partial half-split rotation of queries or keys, in place."""

import torch

from .eager import qk_norm_rope_eager
from .reference import qk_norm_rope_reference

__all__ = ["qk_norm_rope", "qk_norm_rope_eager", "qk_norm_rope_reference"]


def qk_norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise every head, then rotate the pairs (i, i + R), i < R; channels from 2R on are only normalised.

    Args:
        x: [S, H, D], last dimension contiguous; usually a view of the fused qkv projection. Overwritten.
        weight: [D], in x's dtype.
        cos, sin: [S, R], 2R <= D.

    Returns:
        x.
    """
    return qk_norm_rope_eager(x, weight, cos, sin, eps)
