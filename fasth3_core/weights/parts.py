"""The tensors inside a weight, whatever its form."""

from collections.abc import Sequence

import torch

from ..adapters.weight import AdaptedWeight
from ..checkpoint.quant import QuantizedWeight
from .fp8 import Fp8Weight

Weight = torch.Tensor | QuantizedWeight | Fp8Weight | AdaptedWeight


def tensors_of(weight: Weight) -> tuple[torch.Tensor, ...]:
    """Every tensor that a weight holds, in the order that `with_tensors` takes them."""
    return (weight,) if isinstance(weight, torch.Tensor) else weight.tensors()


def with_tensors(weight: Weight, tensors: Sequence[torch.Tensor]) -> Weight:
    """The same weight over other tensors of the same shapes, such as copies on another device."""
    return tensors[0] if isinstance(weight, torch.Tensor) else weight.with_tensors(tensors)


def any_nonzero(weight: Weight) -> bool:
    """Whether a gate does anything: a projection of zeros contributes nothing and is skipped."""
    if isinstance(weight, AdaptedWeight):
        return True  # its increments are why it is there
    data = weight if isinstance(weight, torch.Tensor) else weight.data
    # bytes: float8 has no test for zero on every device, and a negative zero costs no more than its projection
    data = data.view(torch.uint8) if data.itemsize == 1 else data
    return bool(data[:_PROBE_ROWS].any()) or bool(data.any())


_PROBE_ROWS = 16
"""Looked at first: those of a trained gate are never all zero, and on a CPU the whole of it takes 20 ms."""
