"""y = x Wᵀ + b for every form in which W is kept."""

import torch
import torch.nn.functional as F

from ...kernels.quantise_rows import QuantisedRows
from ..adapters.weight import AdaptedWeight
from ..checkpoint.quant import QuantizedWeight
from ..weights.fp8 import FP8, Fp8Weight
from ..weights.parts import Weight
from .ops import TokenOps


def linear(
    x: torch.Tensor | QuantisedRows,
    weight: Weight,
    bias: torch.Tensor | None = None,
    ops: TokenOps | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Project [..., in] to [..., out].

    Args:
        x: in the dtype of the result, or rows that an op made in `operand_form`.
        weight: [out, in]: a tensor in x's dtype; an `AdaptedWeight`, whose increments are added to what its base gives;
            an int8 weight, which is dequantised inside the op; an `Fp8Weight`; any other quantised weight, which is
            dequantised for this call alone.
        ops: of the run. Without, everything quantised is dequantised for the call: for products that a request makes
            once.
        out: [S, out], contiguous, to write the product of x [S, in] into, which then has no bias; None makes a new one.
    """
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.T, out=out)
    if isinstance(weight, AdaptedWeight):
        return weight.add_increments(x, linear(x, weight.base, bias, ops, out))
    if ops is not None and isinstance(weight, Fp8Weight):
        rows = ops.quantise_rows(x, FP8) if isinstance(x, torch.Tensor) else x
        y = ops.fp8_linear(rows, weight.rows, weight.dtype, out=out)
        return y if bias is None else y.add_(bias)
    if ops is not None and isinstance(weight, QuantizedWeight) and weight.format == "int8_tensorwise":
        return ops.int8_linear(x, weight.data, weight.scale, bias, weight.group, out=out)
    return linear(x, weight.dequantise(x.dtype), bias, out=out)


def operand_form(*weights: Weight) -> str:
    """The form in which the op before makes the rows that all of these weights are multiplied with: fp8 if they all
    are, so that rows are quantised once and never written wide; "" for plain rows otherwise."""
    return FP8 if all(isinstance(weight, Fp8Weight) for weight in weights) else ""
