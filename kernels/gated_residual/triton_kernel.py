"""Triton gated_residual. One program a token: x and y are read once, x is written once."""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim

NUM_WARPS = 8
"""0.283 ms for 37,966 tokens x 5376 in bf16 on an H200 (102 % of a copy's rate); 4 0.284, 16 0.328, 2 0.375."""


@triton.jit
def _gated_residual_kernel(
    x_ptr, y_ptr, gate_ptr, rows_ptr,
    stride_x, stride_y, stride_gate,
    C,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    cols = tl.arange(0, BLOCK_C)
    inside = cols < C
    x_ptr += token * stride_x + cols
    x = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_C]
    y = tl.load(y_ptr + token * stride_y + cols, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr, (x + gate * y).to(x_ptr.dtype.element_ty), mask=inside)


def gated_residual_triton(x, y, gate, segments):
    check_last_dim("gated_residual", x=x, y=y, gate=gate)
    S, C = x.shape
    with torch.cuda.device_of(x):
        _gated_residual_kernel[(S,)](
            x, y, gate, segments.rows,
            x.stride(0), y.stride(0), gate.stride(0),
            C,
            BLOCK_C=triton.next_power_of_2(C),
            num_warps=NUM_WARPS,
        )
    return x
