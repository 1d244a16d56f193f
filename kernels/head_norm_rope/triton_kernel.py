"""Triton head_norm_rope. One program a token and group of heads: every channel is read once and written once.

Both channels of a pair are neighbours, so a head is one contiguous load, and a pair is split inside a thread.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim

BLOCK_H = 32
NUM_WARPS = 4


@triton.jit
def _head_norm_rope_kernel(
    x_ptr, bias_ptr, rotation_ptr,
    stride_s, stride_h,
    H, N, eps,
    BIAS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    channel = tl.arange(0, D)
    inside = (heads < H) & (channel[None, :] < D)
    x_ptr += token * stride_s + heads * stride_h + channel[None, :]
    x = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H, D]
    if BIAS:
        x += tl.load(bias_ptr + heads * D + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, D // 2, 2]))
    turns = tl.load(rotation_ptr + (token % N) * D + channel)  # [D], cos and sin of each pair in turn
    cos, sin = tl.split(tl.reshape(turns, [D // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    turned = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [BLOCK_H, D])
    tl.store(x_ptr, turned.to(x_ptr.dtype.element_ty), mask=inside)


def head_norm_rope_triton(x, bias, rotations, eps):
    check_last_dim("head_norm_rope", x=x)
    S, H, D = x.shape
    turns = torch.view_as_real(rotations)
    block = min(BLOCK_H, triton.next_power_of_2(H))
    with torch.cuda.device_of(x):
        _head_norm_rope_kernel[(S, triton.cdiv(H, block))](
            x, turns if bias is None else bias, turns,
            x.stride(0), x.stride(1),
            H, rotations.shape[0], eps,
            BIAS=bias is not None, D=D, BLOCK_H=block,
            num_warps=NUM_WARPS,
        )
