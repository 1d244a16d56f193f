"""y = x Wᵀ + b for every form in which a checkpoint stores W."""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Project [..., in] to [..., out].

    `weight` is a [out, in] tensor in x's dtype, or a `QuantizedWeight`, which is then dequantised for this call alone.
    """
    if not isinstance(weight, torch.Tensor):
        weight = weight.dequantise(x.dtype)
    return F.linear(x, weight, bias)
