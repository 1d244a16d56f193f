"""A float weight in 8 bits, and what that loses.

int8: one scale for each output row, rotated first in groups of input channels (ConvRot), which spreads outliers over
the group. float8_e4m3fn: one scale for the whole weight, as ComfyUI's loader reads it.
"""

import math
from collections.abc import Iterator

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
_CPU_BYTES, _DEVICE_BYTES = 4 << 20, 64 << 20
"""Of fp32 rows at a time: what stays in the caches of a CPU, four times as fast there as the other."""


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


def quantise(weight: torch.Tensor, spec: Spec) -> tuple[QuantizedWeight, float]:
    """The weight [out, in] quantised, on its device, some rows at a time; and what that loses: the norm of the error
    over the norm of the weight, which a rotation changes neither of."""
    int8 = spec.format == FORMS["int8"]
    data = torch.empty_like(weight, dtype=torch.int8 if int8 else torch.float8_e4m3fn)
    scale = torch.empty(weight.shape[0], 1, dtype=torch.float32, device=weight.device)
    largest = 0.0 if int8 else max(float(weight[rows].abs().max()) for rows in _rows(weight))
    squares = lost = 0.0
    for rows in _rows(weight):
        block = weight[rows].float()
        if int8:
            block = rotate(block, spec.group) if spec.group else block
            scale[rows] = (block.abs().amax(1, keepdim=True) / _INT8_MAX).clamp_min(_TINY)
            data[rows] = (block / scale[rows]).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
        else:
            scale[rows] = max(largest / _FP8_MAX, _TINY)
            data[rows] = (block / scale[rows]).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        squares += _square(block)
        lost += _square(torch.addcmul(block, data[rows].float(), scale[rows], value=-1))
    return QuantizedWeight(data, scale, spec.format, spec.group), math.sqrt(lost / squares) if squares else 0.0


def rotate(rows: torch.Tensor, group: int) -> torch.Tensor:
    """fp32 rows times the Hadamard matrix of order `group`, group by group along the last dimension.

    It is a Kronecker product of smaller ones, so two small products do the work of a large one.
    """
    outer = 16 if group > 16 else group
    inner = group // outer
    with full_precision_matmul():
        turned = (rows.reshape(-1, inner) @ hadamard(inner, rows.device)).view(-1, outer, inner)
        turned = turned.transpose(1, 2).reshape(-1, outer) @ hadamard(outer, rows.device)
    return turned.view(-1, inner, outer).transpose(1, 2).reshape(rows.shape)


def _square(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _rows(weight: torch.Tensor) -> Iterator[slice]:
    size = _CPU_BYTES if weight.device.type == "cpu" else _DEVICE_BYTES
    step = max(1, size // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)
