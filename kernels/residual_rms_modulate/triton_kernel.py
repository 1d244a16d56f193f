"""Triton residual_rms_modulate. One program a token, in two passes over its channels: the new residual stream and its
sum of squares, then the modulated norm, which finds the stream in the cache. See rms_modulate for why not in one.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim
from ..quantise_rows.forms import FORMS, empty_rows
from ..rms_modulate.triton_kernel import store_modulated

BLOCK_C = 2048
NUM_WARPS = 4
"""0.395 ms for 37,966 tokens x 5376 in bf16 on an H200, 97 % of a copy's rate; 1024 x 4 warps 0.404, 2048 x 8 0.412."""

ROW_WARPS = 8
"""Where the result is quantised: 0.450 ms to fp8; 4 warps 0.476, plain and quantised after 0.541."""


@triton.jit
def _residual_rms_modulate_kernel(
    x_ptr, y_ptr, gate_ptr, weight_ptr, scale_ptr, shift_ptr, rows_ptr, out_ptr, row_scale_ptr,
    stride_x, stride_y, stride_gate, stride_scale, stride_shift,
    eps,
    C: tl.constexpr, TOP: tl.constexpr, BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    x_ptr += token * stride_x
    y_ptr += token * stride_y
    out_ptr += token * C
    gate_ptr += row * stride_gate
    scale_ptr += row * stride_scale
    shift_ptr += row * stride_shift
    squares = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        inside = cols < C
        x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        # the norm is that of the stream as it is kept, so this equals the two ops one after the other
        x = (x + gate * y).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + cols, x, mask=inside)
        squares += x.to(tl.float32) * x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(squares, axis=0) / C + eps)
    tl.debug_barrier()  # the second pass may give a channel to another thread than the one that stored it
    store_modulated(
        x_ptr, weight_ptr, scale_ptr, shift_ptr, out_ptr, row_scale_ptr + token, inverse_rms, C, TOP, BLOCK_C
    )


def residual_rms_modulate_triton(x, y, gate, weight, scale, shift, segments, eps, form=""):
    check_last_dim("residual_rms_modulate", x=x, y=y, gate=gate, weight=weight, scale=scale, shift=shift)
    S, C = x.shape
    rows = empty_rows(S, C, form, x.device) if form else None
    out = torch.empty(S, C, dtype=x.dtype, device=x.device) if rows is None else rows.data
    with torch.cuda.device_of(x):
        _residual_rms_modulate_kernel[(S,)](
            x, y, gate, weight, scale, shift, segments.rows, out, x if rows is None else rows.scale,
            x.stride(0), y.stride(0), gate.stride(0), scale.stride(0), shift.stride(0),
            eps,
            C=C, TOP=int(FORMS[form][1]) if form else 0, BLOCK_C=min(BLOCK_C, triton.next_power_of_2(C)),
            num_warps=ROW_WARPS if form else NUM_WARPS,
        )
    return out if rows is None else rows
