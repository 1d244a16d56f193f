"""y = x Wᵀ + b for every form in which a checkpoint stores W."""

import torch
import torch.nn.functional as F

from ..adapters.weight import AdaptedWeight


def linear(x: torch.Tensor, weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Project [..., in] to [..., out].

    `weight` is a [out, in] tensor in x's dtype, a `QuantizedWeight`, which is then dequantised for this call alone, or
    an `AdaptedWeight` over either, whose increments are added to the result.
    """
    if isinstance(weight, AdaptedWeight):
        return weight.add_increments(x, linear(x, weight.base, bias))
    if not isinstance(weight, torch.Tensor):
        weight = weight.dequantise(x.dtype)
    return F.linear(x, weight, bias)
