"""Triton rms_modulate. One program a token, in two passes over its channels: the sum of squares, then the result. A
quantised row takes a third in between, for its largest magnitude.

The later passes find the channels in the cache. Keeping them in registers instead takes 98 of these a thread, and too
few programs fit on a multiprocessor to keep the memory busy: 0.35 ms instead of 0.20 for 37,966 tokens x 5376 in bf16
on an H200 (95 % of a copy's rate). A row of weight, scale and shift is three times the traffic of the token itself, but
stays in the cache from token to token.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim
from ..quantise_rows.forms import FORMS, empty_rows
from ..quantise_rows.triton_kernel import quantised, row_scale

BLOCK_C = 2048
NUM_WARPS = 4
"""0.203 ms; 1024 x 4 warps 0.214, 2048 x 8 0.215, 1024 x 8 0.233, 2048 x 2 0.247, 512 x 4 0.248.

To fp8 0.337 ms, beside 0.348 for plain and quantised after; 1024 x 4 warps 0.374, 2048 x 8 0.376, 8192 x 8 0.468."""


@triton.jit
def _modulated(x_ptr, weight_ptr, scale_ptr, shift_ptr, cols, inside, inverse_rms):
    """[BLOCK_C] of a token's result in fp32, 0 where not `inside`."""
    x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return x * inverse_rms * weight * (1.0 + scale) + shift


@triton.jit
def store_modulated(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, out_ptr, row_scale_ptr, inverse_rms,
    C: tl.constexpr, TOP: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Write the row of one token, whose pointers these are: as it is if TOP is 0, else quantised to +-TOP."""
    if TOP > 0:
        largest = tl.zeros([BLOCK_C], dtype=tl.float32)
        for start in range(0, C, BLOCK_C):
            cols = start + tl.arange(0, BLOCK_C)
            out = _modulated(x_ptr, weight_ptr, scale_ptr, shift_ptr, cols, cols < C, inverse_rms)
            largest = tl.maximum(largest, tl.abs(out))
        step = row_scale(tl.max(largest, axis=0), TOP)
        tl.store(row_scale_ptr, step)
    for start in range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        inside = cols < C
        out = _modulated(x_ptr, weight_ptr, scale_ptr, shift_ptr, cols, inside, inverse_rms)
        if TOP > 0:
            out = quantised(out, step, TOP)
        tl.store(out_ptr + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_modulate_kernel(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, rows_ptr, out_ptr, row_scale_ptr,
    stride_x, stride_scale, stride_shift,
    eps,
    C: tl.constexpr, TOP: tl.constexpr, BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    x_ptr += token * stride_x
    out_ptr += token * C
    scale_ptr += row * stride_scale
    shift_ptr += row * stride_shift
    squares = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        x = tl.load(x_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
        squares += x * x
    inverse_rms = tl.rsqrt(tl.sum(squares, axis=0) / C + eps)
    store_modulated(
        x_ptr, weight_ptr, scale_ptr, shift_ptr, out_ptr, row_scale_ptr + token, inverse_rms, C, TOP, BLOCK_C
    )


def rms_modulate_triton(x, weight, scale, shift, segments, eps, form=""):
    check_last_dim("rms_modulate", x=x, weight=weight, scale=scale, shift=shift)
    S, C = x.shape
    rows = empty_rows(S, C, form, x.device) if form else None
    out = torch.empty(S, C, dtype=x.dtype, device=x.device) if rows is None else rows.data
    with torch.cuda.device_of(x):
        _rms_modulate_kernel[(S,)](
            x, weight, scale, shift, segments.rows, out, x if rows is None else rows.scale,
            x.stride(0), scale.stride(0), shift.stride(0),
            eps,
            C=C, TOP=int(FORMS[form][1]) if form else 0, BLOCK_C=min(BLOCK_C, triton.next_power_of_2(C)),
            num_warps=NUM_WARPS,
        )
    return out if rows is None else rows
