"""Triton residual_rms. One program a token, whose channels stay in registers between the sum and the norm."""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim, warps_in_place
from ..quantise_rows.forms import FORMS, empty_rows
from ..quantise_rows.triton_kernel import store_row

NUM_WARPS = 4


@triton.jit
def _residual_rms_kernel(
    x_ptr, y_ptr, scale_ptr, bias_ptr, weight_ptr, out_ptr, row_scale_ptr,
    stride_x, stride_y,
    C, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr, BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_C)
    inside = cols < C
    x_ptr += token * stride_x + cols
    x = tl.load(x_ptr, mask=inside, other=0.0)  # [BLOCK_C]
    if ADD:
        y = tl.load(y_ptr + token * stride_y + cols, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(scale_ptr + cols, mask=inside, other=0.0) * y
        tl.store(x_ptr, x, mask=inside)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / C + eps)
    out = x * inverse_rms * tl.load(weight_ptr + cols, mask=inside, other=0.0)
    store_row(out_ptr + token * C, row_scale_ptr, token, cols, inside, out, TOP)


def residual_rms_triton(x, y, scale, bias, weight, eps, dtype, form=""):
    add, has_bias = y is not None, y is not None and bias is not None
    # a branch that is not taken reads no pointer: any tensor stands in for it
    y, scale, bias = (y, scale, bias if has_bias else weight) if add else (x, weight, weight)
    check_last_dim("residual_rms", x=x, y=y, scale=scale, bias=bias, weight=weight)
    S, C = x.shape
    rows = empty_rows(S, C, form, x.device) if form else None
    out = torch.empty(S, C, dtype=dtype, device=x.device) if rows is None else rows.data
    block = triton.next_power_of_2(C)
    with torch.cuda.device_of(x):
        _residual_rms_kernel[(S,)](
            x, y, scale, bias, weight, out, weight if rows is None else rows.scale,
            x.stride(0), y.stride(0),
            C, eps,
            ADD=add, BIAS=has_bias, TOP=int(FORMS[form][1]) if form else 0, BLOCK_C=block,
            num_warps=warps_in_place(block, NUM_WARPS),
        )
    return out if rows is None else rows
