"""swiglu: silu(gate) * value, for files with the gate half first and for files with the value half first."""

import torch

from .eager import swiglu_eager
from .reference import swiglu_reference

__all__ = ["swiglu", "swiglu_eager", "swiglu_reference"]


def swiglu(x: torch.Tensor, *, gate_first: bool) -> torch.Tensor:
    """silu(gate) * value.

    Args:
        x: [S, 2F]. Not changed.
        gate_first: whether the gate is the first half (single-file and original checkpoints) or the second (diffusers).

    Returns:
        [S, F] in x's dtype.
    """
    return swiglu_eager(x, gate_first)
