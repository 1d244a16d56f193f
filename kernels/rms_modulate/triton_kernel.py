"""Triton rms_modulate. One program a token.

Plain: two passes over the channels, the sum of squares, then the result; the second finds them in the cache. Keeping
them in registers instead takes 98 of these a thread, and too few programs fit on a multiprocessor to keep the memory
busy: 0.35 ms instead of 0.20 for 37,966 tokens x 5376 in bf16 on an H200 (95 % of a copy's rate). A row of weight,
scale and shift is three times the traffic of the token itself, but stays in the cache from token to token.

Quantised: one pass, the channels in registers, for which instructions are scarcer than memory: reading the channels
three times takes twice as many.
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

To fp8 0.210 ms; 8 warps 0.241, 16 warps 0.315, three passes 0.337, plain and quantised after 0.348."""


@triton.jit
def _modulated(x, weight_ptr, scale_ptr, shift_ptr, cols, inside, inverse_rms):
    """A token's result in fp32, 0 where not `inside`."""
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return x * inverse_rms * weight * (1.0 + scale) + shift


@triton.jit
def store_modulated(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, out_ptr, inverse_rms, C: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Write the row of one token, whose pointers these are."""
    for start in range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        inside = cols < C
        x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        out = _modulated(x, weight_ptr, scale_ptr, shift_ptr, cols, inside, inverse_rms)
        tl.store(out_ptr + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def columns(C: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """The channels of a row in two parts, and which of the second are inside."""
    rest = MAIN + tl.arange(0, REST)
    return tl.arange(0, MAIN), rest, rest < C


@triton.jit
def store_quantised(
    main, rest, weight_ptr, scale_ptr, shift_ptr, out_ptr, row_scale_ptr, eps,
    C: tl.constexpr, TOP: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):
    """Norm, modulate and quantise to +-TOP the row of one token, given in fp32 in the two parts of `columns`."""
    main_cols, rest_cols, inside = columns(C, MAIN, REST)
    inverse_rms = tl.rsqrt((tl.sum(main * main, axis=0) + tl.sum(rest * rest, axis=0)) / C + eps)
    main = _modulated(main, weight_ptr, scale_ptr, shift_ptr, main_cols, main_cols < MAIN, inverse_rms)
    rest = _modulated(rest, weight_ptr, scale_ptr, shift_ptr, rest_cols, inside, inverse_rms)
    step = row_scale(tl.maximum(tl.max(tl.abs(main), axis=0), tl.max(tl.abs(rest), axis=0)), TOP)
    tl.store(row_scale_ptr, step)
    element = out_ptr.dtype.element_ty
    tl.store(out_ptr + main_cols, quantised(main, step, TOP).to(element))
    tl.store(out_ptr + rest_cols, quantised(rest, step, TOP).to(element), mask=inside)


def parts(C: int) -> tuple[int, int]:
    """MAIN and REST: the largest power of two within C channels, and one that covers those after it. 5376 channels lie
    in 6144, not in 8192."""
    main = triton.next_power_of_2(C + 1) // 2
    return main, triton.next_power_of_2(max(1, C - main))


@triton.jit
def _rms_modulate_kernel(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, rows_ptr, out_ptr,
    stride_x, stride_scale, stride_shift,
    eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    x_ptr += token * stride_x
    squares = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        x = tl.load(x_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
        squares += x * x
    inverse_rms = tl.rsqrt(tl.sum(squares, axis=0) / C + eps)
    scale_ptr += row * stride_scale
    shift_ptr += row * stride_shift
    store_modulated(x_ptr, weight_ptr, scale_ptr, shift_ptr, out_ptr + token * C, inverse_rms, C, BLOCK_C)


@triton.jit
def _rms_quantise_kernel(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, rows_ptr, out_ptr, row_scale_ptr,
    stride_x, stride_scale, stride_shift,
    eps,
    C: tl.constexpr, TOP: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    x_ptr += token * stride_x
    main_cols, rest_cols, inside = columns(C, MAIN, REST)
    main = tl.load(x_ptr + main_cols).to(tl.float32)  # [MAIN]
    rest = tl.load(x_ptr + rest_cols, mask=inside, other=0.0).to(tl.float32)  # [REST]
    store_quantised(
        main, rest, weight_ptr, scale_ptr + row * stride_scale, shift_ptr + row * stride_shift,
        out_ptr + token * C, row_scale_ptr + token, eps, C, TOP, MAIN, REST,
    )


def rms_modulate_triton(x, weight, scale, shift, segments, eps, form=""):
    check_last_dim("rms_modulate", x=x, weight=weight, scale=scale, shift=shift)
    S, C = x.shape
    strides = x.stride(0), scale.stride(0), shift.stride(0)
    with torch.cuda.device_of(x):
        if not form:
            out = torch.empty(S, C, dtype=x.dtype, device=x.device)
            _rms_modulate_kernel[(S,)](
                x, weight, scale, shift, segments.rows, out, *strides, eps,
                C=C, BLOCK_C=min(BLOCK_C, triton.next_power_of_2(C)), num_warps=NUM_WARPS,
            )
            return out
        rows, (main, rest) = empty_rows(S, C, form, x.device), parts(C)
        _rms_quantise_kernel[(S,)](
            x, weight, scale, shift, segments.rows, rows.data, rows.scale, *strides, eps,
            C=C, TOP=int(FORMS[form][1]), MAIN=main, REST=rest, num_warps=NUM_WARPS,
        )
        return rows
