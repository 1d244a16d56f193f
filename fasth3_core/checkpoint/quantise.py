"""A float weight in 8 bits, and what that loses.

int8: one scale for each output row, rotated first in groups of input channels (ConvRot), which spreads outliers over
the group. float8_e4m3fn: one scale for the whole weight, as ComfyUI's loader reads it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...kernels.int8_linear import hadamard
from ...kernels.precision import full_precision_matmul
from .quant import DEFAULT_GROUP, QuantizedWeight, Spec

FORMS = {"int8": "int8_tensorwise", "fp8": "float8_e4m3fn"}
"""What the command line calls them -> format of the marker."""

SMALLEST_GROUP = 16
_INT8_MAX, _FP8_MAX = 127.0, 448.0
_TINY = 1e-30
"""Least scale: a row of zeros stays zeros."""
_BYTES = 64 << 20
"""Of fp32 rows at a time."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What the 8 bits lose of a weight."""

    relative: float
    """Norm of the error over the norm of the weight."""
    largest: float
    """Largest error of a value, in multiples of the weight's root mean square."""


def spec_for(form: str, columns: int, group: int = DEFAULT_GROUP) -> Spec:
    """How a weight of `columns` input channels is quantised: the largest power of four up to `group` that divides them.

    Args:
        form: "int8" or "fp8".
        group: 0 for int8 without rotation.
    """
    if form == "fp8" or not group:
        return Spec(FORMS[form])
    size = group
    while size >= SMALLEST_GROUP and columns % size:
        size //= 4
    return Spec(FORMS[form], size if size >= SMALLEST_GROUP else None)


def quantise(weight: torch.Tensor, spec: Spec) -> tuple[QuantizedWeight, Loss]:
    """The weight [out, in] quantised, on its device, some rows at a time; and the loss."""
    data = torch.empty_like(weight, dtype=torch.int8 if spec.format == FORMS["int8"] else torch.float8_e4m3fn)
    scale = torch.empty(weight.shape[0], 1, dtype=torch.float32, device=weight.device)
    whole = (float(weight.abs().max()) / _FP8_MAX) if spec.format != FORMS["int8"] else 0.0
    squares = lost = 0.0
    largest = 0.0
    for rows in _rows(weight):
        block = weight[rows].float()
        if spec.format == FORMS["int8"]:
            data[rows], scale[rows] = _int8(block, spec.group)
        else:
            scale[rows] = max(whole, _TINY)
            data[rows] = (block / scale[rows]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        made = QuantizedWeight(data[rows], scale[rows], spec.format, spec.group)
        error = made.dequantise(torch.float32) - block
        squares, lost = squares + float(block.double().square().sum()), lost + float(error.double().square().sum())
        largest = max(largest, float(error.abs().max()))
    rms = math.sqrt(squares / weight.numel())
    loss = Loss(math.sqrt(lost / squares) if squares else 0.0, largest / rms if rms else 0.0)
    return QuantizedWeight(data, scale, spec.format, spec.group), loss


def _int8(block: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    if group:
        with full_precision_matmul():
            block = (block.view(-1, group) @ hadamard(group, block.device)).view_as(block)
    scale = (block.abs().amax(1, keepdim=True) / _INT8_MAX).clamp_min(_TINY)
    return (block / scale).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8), scale


def _rows(weight: torch.Tensor) -> Iterator[slice]:
    step = max(1, _BYTES // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)
