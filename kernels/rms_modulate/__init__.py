"""rms_modulate: RMSNorm, then scale and shift by the modulation row of each token's segment."""

from collections.abc import Sequence

import torch

from .eager import rms_modulate_eager
from .reference import rms_modulate_reference

__all__ = ["rms_modulate", "rms_modulate_eager", "rms_modulate_reference"]


def rms_modulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    segments: Sequence[tuple[int, int, int]],
    eps: float,
) -> torch.Tensor:
    """RMSNorm(x) * (1 + scale[r]) + shift[r].

    Args:
        x: [S, C], last dimension contiguous. Not changed.
        weight: [C], in x's dtype.
        scale, shift: [R, C], in x's dtype.
        segments: (start, stop, r) in order, covering [0, S).

    Returns:
        [S, C] in x's dtype.
    """
    return rms_modulate_eager(x, weight, scale, shift, segments, eps)
