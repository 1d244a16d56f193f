"""Triton qk_norm_rope. One program a token and group of heads: every channel of q and k is read once and written once.

The two halves of the rotated pairs and the channels behind them are three loads, so that both channels of a pair sit at
the same place of their tensors and nothing moves between threads. Queries and keys share the angles and the launch.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim


@triton.jit
def _norm_rope(
    x_ptr, weight_ptr, cos, sin, heads, H, eps,
    R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):
    """x_ptr: [BLOCK_H, 1], the first channel of each head; cos, sin: [1, BLOCK_R] fp32."""
    pair = tl.arange(0, BLOCK_R)
    pairs = pair < R
    inside = (heads[:, None] < H) & pairs[None, :]
    first_ptr = x_ptr + pair[None, :]
    second_ptr = first_ptr + R
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_R]
    second = tl.load(second_ptr, mask=inside, other=0.0).to(tl.float32)
    square_sum = tl.sum(first * first + second * second, axis=1)  # [BLOCK_H]
    if BLOCK_REST > 0:
        channel = 2 * R + tl.arange(0, BLOCK_REST)
        inside_rest = (heads[:, None] < H) & (channel[None, :] < D)
        rest_ptr = x_ptr + channel[None, :]
        rest = tl.load(rest_ptr, mask=inside_rest, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_REST]
        square_sum += tl.sum(rest * rest, axis=1)
    inverse_rms = tl.rsqrt(square_sum / D + eps)[:, None]
    element = x_ptr.dtype.element_ty
    first *= inverse_rms * tl.load(weight_ptr + pair, mask=pairs, other=0.0).to(tl.float32)[None, :]
    second *= inverse_rms * tl.load(weight_ptr + R + pair, mask=pairs, other=0.0).to(tl.float32)[None, :]
    tl.store(first_ptr, (first * cos - second * sin).to(element), mask=inside)
    tl.store(second_ptr, (second * cos + first * sin).to(element), mask=inside)
    if BLOCK_REST > 0:
        rest *= inverse_rms * tl.load(weight_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]
        tl.store(rest_ptr, rest.to(element), mask=inside_rest)


@triton.jit
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    stride_qs, stride_qh, stride_ks, stride_kh, stride_cos, stride_sin,
    H, eps,
    R: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):
    # int64 before any stride: [S, 3, 56, 128] passes 2**31 elements at 99,865 tokens
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_R)
    cos = tl.load(cos_ptr + token * stride_cos + pair, mask=pair < R, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * stride_sin + pair, mask=pair < R, other=0.0).to(tl.float32)[None, :]
    q_ptr += token * stride_qs + heads[:, None] * stride_qh
    k_ptr += token * stride_ks + heads[:, None] * stride_kh
    _norm_rope(q_ptr, q_weight_ptr, cos, sin, heads, H, eps, R, D, BLOCK_R, BLOCK_REST)
    _norm_rope(k_ptr, k_weight_ptr, cos, sin, heads, H, eps, R, D, BLOCK_R, BLOCK_REST)


def qk_norm_rope_triton(q, k, q_weight, k_weight, cos, sin, eps):
    check_last_dim("qk_norm_rope", q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    S, H, D = q.shape
    R = cos.shape[-1]
    block_h = min(8, triton.next_power_of_2(H))
    with torch.cuda.device_of(q):
        _qk_norm_rope_kernel[(S, triton.cdiv(H, block_h))](
            q, k, q_weight, k_weight, cos, sin,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
            H, eps,
            R=R, D=D,
            BLOCK_H=block_h,
            BLOCK_R=triton.next_power_of_2(R),
            BLOCK_REST=triton.next_power_of_2(D - 2 * R) if D > 2 * R else 0,
            num_warps=1,
        )
