"""Triton rms_modulate. One program a token: its channels are read once, kept in registers, and written once.

A row of weight, scale and shift is three times the traffic of the token itself, but stays in the cache between tokens.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim


@triton.jit
def _rms_modulate_kernel(
    x_ptr, weight_ptr, scale_ptr, shift_ptr, rows_ptr, out_ptr,
    stride_x, stride_scale, stride_shift,
    C, eps,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    cols = tl.arange(0, BLOCK_C)
    inside = cols < C
    x = tl.load(x_ptr + token * stride_x + cols, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_C]
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row * stride_scale + cols, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + row * stride_shift + cols, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / C + eps)
    out = x * inverse_rms * weight * (1.0 + scale) + shift
    tl.store(out_ptr + token * C + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_modulate_triton(x, weight, scale, shift, segments, eps):
    check_last_dim("rms_modulate", x=x, weight=weight, scale=scale, shift=shift)
    S, C = x.shape
    out = torch.empty(S, C, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _rms_modulate_kernel[(S,)](
            x, weight, scale, shift, segments.rows, out,
            x.stride(0), scale.stride(0), shift.stride(0),
            C, eps,
            BLOCK_C=triton.next_power_of_2(C),
            num_warps=8,
        )
    return out
