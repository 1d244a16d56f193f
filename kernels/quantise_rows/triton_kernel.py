"""Triton quantise_rows, and the function that other kernels end in. One program a row, which stays in registers."""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim
from .forms import FORMS, TINY, empty_rows

NUM_WARPS = 4
_TINY = tl.constexpr(TINY)
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and taking it away rounds an fp32 number below 2**22 to the nearest even integer."""


@triton.jit
def row_scale(largest, TOP: tl.constexpr):
    """The scale of a row whose largest magnitude is given."""
    return tl.maximum(largest / TOP, _TINY)


@triton.jit
def quantised(out, scale, TOP: tl.constexpr):
    """fp32 values in units of `scale`, ready to be stored in a type that reaches +-TOP."""
    out *= 1.0 / scale
    if TOP == 127:
        out = (out + _ROUND) - _ROUND
    return tl.minimum(tl.maximum(out, -TOP), TOP)


@triton.jit
def store_row(out_ptr, row_scale_ptr, row, cols, inside, out, TOP: tl.constexpr):
    """Write a row of fp32 values that are 0 where not `inside`: as they are if TOP is 0, else quantised to +-TOP."""
    if TOP > 0:
        scale = row_scale(tl.max(tl.abs(out), axis=0), TOP)
        tl.store(row_scale_ptr + row, scale)
        out = quantised(out, scale, TOP)
    tl.store(out_ptr + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantise_rows_kernel(x_ptr, out_ptr, row_scale_ptr, stride_x, C, TOP: tl.constexpr, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_C)
    inside = cols < C
    x = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_C]
    store_row(out_ptr + row * C, row_scale_ptr, row, cols, inside, x, TOP)


def quantise_rows_triton(x, form):
    check_last_dim("quantise_rows", x=x)
    S, C = x.shape
    out = empty_rows(S, C, form, x.device)
    with torch.cuda.device_of(x):
        _quantise_rows_kernel[(S,)](
            x, out.data, out.scale,
            x.stride(0),
            C,
            TOP=int(FORMS[form][1]), BLOCK_C=triton.next_power_of_2(C),
            num_warps=NUM_WARPS,
        )
    return out
