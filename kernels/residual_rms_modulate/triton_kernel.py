"""Triton residual_rms_modulate. One program a token. Plain: two passes over its channels, the new residual stream and
its sum of squares, then the modulated norm, which finds the stream in the cache. Quantised: one pass, the channels in
registers. See rms_modulate for why.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim, warps_in_place
from ..quantise_rows.forms import FORMS, empty_rows
from ..rms_modulate.triton_kernel import columns, parts, store_modulated, store_quantised

BLOCK_C = 2048
NUM_WARPS = 4
"""0.395 ms for 37,966 tokens x 5376 in bf16 on an H200, 97 % of a copy's rate; 1024 x 4 warps 0.404, 2048 x 8 0.412.

To fp8 0.394 ms; 8 warps 0.418, 16 warps 0.553, three passes 0.446, plain and quantised after 0.541."""


@triton.jit
def _advance(x_ptr, y_ptr, gate_ptr, cols, inside):
    """Add gate * y to a part of a token's stream, and return that part in fp32, 0 where not `inside`.

    The norm is that of the stream as it is kept, so that this equals the two ops one after the other.
    """
    x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    x = (x + gate * y).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + cols, x, mask=inside)
    return x.to(tl.float32)


@triton.jit
def _residual_rms_modulate_kernel(
    x_ptr, y_ptr, gate_ptr, weight_ptr, scale_ptr, shift_ptr, rows_ptr, out_ptr,
    stride_x, stride_y, stride_gate, stride_scale, stride_shift,
    eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    x_ptr += token * stride_x
    y_ptr += token * stride_y
    gate_ptr += row * stride_gate
    squares = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        x = _advance(x_ptr, y_ptr, gate_ptr, cols, cols < C)
        squares += x * x
    inverse_rms = tl.rsqrt(tl.sum(squares, axis=0) / C + eps)
    scale_ptr += row * stride_scale
    shift_ptr += row * stride_shift
    tl.debug_barrier()  # the second pass may give a channel to another thread than the one that stored it
    store_modulated(x_ptr, weight_ptr, scale_ptr, shift_ptr, out_ptr + token * C, inverse_rms, C, BLOCK_C)


@triton.jit
def _residual_rms_quantise_kernel(
    x_ptr, y_ptr, gate_ptr, weight_ptr, scale_ptr, shift_ptr, rows_ptr, out_ptr, row_scale_ptr,
    stride_x, stride_y, stride_gate, stride_scale, stride_shift,
    eps,
    C: tl.constexpr, TOP: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    x_ptr += token * stride_x
    y_ptr += token * stride_y
    gate_ptr += row * stride_gate
    main_cols, rest_cols, inside = columns(C, MAIN, REST)
    main = _advance(x_ptr, y_ptr, gate_ptr, main_cols, main_cols < MAIN)  # [MAIN]
    rest = _advance(x_ptr, y_ptr, gate_ptr, rest_cols, inside)  # [REST]
    store_quantised(
        main, rest, weight_ptr, scale_ptr + row * stride_scale, shift_ptr + row * stride_shift,
        out_ptr + token * C, row_scale_ptr + token, eps, C, TOP, MAIN, REST,
    )


def residual_rms_modulate_triton(x, y, gate, weight, scale, shift, segments, eps, form=""):
    check_last_dim("residual_rms_modulate", x=x, y=y, gate=gate, weight=weight, scale=scale, shift=shift)
    S, C = x.shape
    strides = x.stride(0), y.stride(0), gate.stride(0), scale.stride(0), shift.stride(0)
    with torch.cuda.device_of(x):
        if not form:
            out, block = torch.empty(S, C, dtype=x.dtype, device=x.device), min(BLOCK_C, triton.next_power_of_2(C))
            _residual_rms_modulate_kernel[(S,)](
                x, y, gate, weight, scale, shift, segments.rows, out, *strides, eps,
                C=C, BLOCK_C=block, num_warps=warps_in_place(block, NUM_WARPS),
            )
            return out
        rows, (main, rest) = empty_rows(S, C, form, x.device), parts(C)
        _residual_rms_quantise_kernel[(S,)](
            x, y, gate, weight, scale, shift, segments.rows, rows.data, rows.scale, *strides, eps,
            C=C, TOP=int(FORMS[form][1]), MAIN=main, REST=rest,
            num_warps=warps_in_place(rest if main < C else main, NUM_WARPS),
        )
        return rows
