"""gated_residual: x += gate * y with the modulation row of each token's segment."""

from collections.abc import Sequence

import torch

from .eager import gated_residual_eager
from .reference import gated_residual_reference

__all__ = ["gated_residual", "gated_residual_eager", "gated_residual_reference"]


def gated_residual(
    x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, segments: Sequence[tuple[int, int, int]]
) -> torch.Tensor:
    """Add gate[r] * y to x in place and return x.

    Args:
        x, y: [S, C], same dtype. x is overwritten.
        gate: [R, C], in x's dtype. A plain multiplier: no activation.
        segments: (start, stop, r) in order, covering [0, S).
    """
    return gated_residual_eager(x, y, gate, segments)
