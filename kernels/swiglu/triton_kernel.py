"""Triton swiglu. Plain: one program a token and block of channels, in place on the value. Quantised: one program a
token, for its scale.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim
from ..quantise_rows.forms import FORMS, empty_rows
from ..quantise_rows.triton_kernel import store_row

BLOCK_F = 4096
NUM_WARPS = 4
"""0.337 ms for 16,384 tokens x 14336 in bf16 on an H200 (98 % of a copy's rate); 512 to 2048 0.340 to 0.344."""

ROW_WARPS = 8
"""For a whole row. 0.691 ms to fp8 for 37,966 tokens x 14336 on an H200; 16 warps 0.721, two ops 1.203."""


@triton.jit
def _swiglu_kernel(
    value_ptr, gate_ptr, bias_ptr, out_ptr, row_scale_ptr,
    stride_value, stride_gate, stride_out,
    F,
    BIAS: tl.constexpr, TOP: tl.constexpr, BLOCK_F: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = cols < F
    value = tl.load(value_ptr + token * stride_value + cols, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_F]
    gate = tl.load(gate_ptr + token * stride_gate + cols, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(bias_ptr + F + cols, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * value
    store_row(out_ptr + token * stride_out, row_scale_ptr, token, cols, inside, out, TOP)


def swiglu_triton(value, gate, bias=None, form=""):
    check_last_dim("swiglu", value=value, gate=gate)
    S, F = value.shape
    rows = empty_rows(S, F, form, value.device) if form else None
    out = value if rows is None else rows.data
    whole = triton.next_power_of_2(F)
    block = whole if form else min(BLOCK_F, whole)
    with torch.cuda.device_of(value):
        _swiglu_kernel[(S, triton.cdiv(F, block))](
            value, gate, value if bias is None else bias, out, value if rows is None else rows.scale,
            value.stride(0), gate.stride(0), out.stride(0),
            F,
            BIAS=bias is not None, TOP=int(FORMS[form][1]) if form else 0, BLOCK_F=block,
            num_warps=ROW_WARPS if form else NUM_WARPS,
        )
    return out if rows is None else rows
