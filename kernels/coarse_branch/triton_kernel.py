"""Triton coarse_branch, in two launches: coarse vectors of the tiles, then one gated pass over the tokens.

The softmax is online, so scores are read once and no weights are written. The vectors are a 64th of the tokens; the
second launch reads `out` and `gate` once and writes `out` once, whatever their strides.
"""

import torch
import triton
import triton.language as tl

from ..device import INTERPRET, check_last_dim
from ..tile_mean.triton_kernel import head_and_tile

_LOG2_E = 1.4426950408889634
_ROWS = 16
"""Tokens taken at once. On an H200 4.0 TB/s with two warps; 64 tokens in four warps 3.7."""


@triton.jit
def _product(a, b, acc, SPLIT: tl.constexpr):
    """acc + a b in fp32, or to 16 bits of a and b: each as the sum of two bf16, without the product of the low ones."""
    if SPLIT:
        a_high = a.to(tl.bfloat16)
        b_high = b.to(tl.bfloat16)
        a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
        b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(a_low, b_high, acc)
        acc = tl.dot(a_high, b_low, acc)
        return tl.dot(a_high, b_high, acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _coarse_vectors_kernel(
    scores_ptr, v_ptr, coarse_ptr,
    stride_sh, stride_sn,
    N, D,
    LOG2_E: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    tile = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)
    scores_ptr += head * stride_sh + tile.to(tl.int64)[:, None] * stride_sn
    v_ptr += head * N * D
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(0, N, BLOCK_N, num_stages=1):  # three stages hold three times the memory: 0.55 ms for 0.22
        keys = first + key
        inside = (tile[:, None] < N) & (keys[None, :] < N)
        score = tl.load(scores_ptr + keys[None, :], mask=inside, other=-float("inf"))  # [BLOCK_M, BLOCK_N]
        score = tl.where(tile[:, None] < N, score * LOG2_E, 0.0)  # rows past the end stay finite
        inside_v = (keys[:, None] < N) & (col[None, :] < D)
        v = tl.load(v_ptr + keys[:, None] * D + col[None, :], mask=inside_v, other=0.0)  # [BLOCK_N, BLOCK_D]
        higher = tl.maximum(highest, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.sum(weight, axis=1)
        acc = _product(weight, v, acc * rescale[:, None], SPLIT)
        highest = higher
    coarse = (acc / total[:, None]).to(coarse_ptr.dtype.element_ty)
    coarse_ptr += head * N * D
    inside = (tile[:, None] < N) & (col[None, :] < D)
    tl.store(coarse_ptr + tile[:, None] * D + col[None, :], coarse, mask=inside)


@triton.jit
def _gated_add_kernel(
    out_ptr, coarse_ptr, gate_ptr, offsets_ptr,
    stride_os, stride_oh, stride_gs, stride_gh,
    N, D,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):
    head, tile, start, size = head_and_tile(offsets_ptr)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_D)
    coarse = tl.load(coarse_ptr + (head * N + tile) * D + col, mask=col < D, other=0.0).to(tl.float32)
    out_ptr += start * stride_os + head * stride_oh
    gate_ptr += start * stride_gs + head * stride_gh
    for first in range(0, size, ROWS):
        rows = (first + row)[:, None]
        inside = (rows < size) & (col[None, :] < D)
        here = out_ptr + rows * stride_os + col[None, :]
        gate = tl.load(gate_ptr + rows * stride_gs + col[None, :], mask=inside, other=0.0).to(tl.float32)
        out = tl.load(here, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK_D]
        tl.store(here, (out + coarse[None, :] * gate).to(out_ptr.dtype.element_ty), mask=inside)


def coarse_branch_triton(out, scores, v_mean, gate, offsets):
    check_last_dim("coarse_branch", out=out, scores=scores, gate=gate)
    if not v_mean.is_contiguous():
        raise ValueError(f"coarse_branch: v_mean {tuple(v_mean.shape)} has strides {v_mean.stride()}; expected dense")
    _, H, D = out.shape
    N = offsets.numel() - 1
    coarse = torch.empty(H, N, D, dtype=out.dtype, device=out.device)
    block_d = max(16, triton.next_power_of_2(D))
    with torch.cuda.device_of(out):
        _coarse_vectors_kernel[(triton.cdiv(N, 64), H)](
            scores, v_mean, coarse,
            scores.stride(0), scores.stride(1),
            N, D,
            LOG2_E=_LOG2_E,
            SPLIT=_splits(out),
            BLOCK_M=64, BLOCK_N=32, BLOCK_D=block_d,
            num_warps=4,
        )
        _gated_add_kernel[(H, N)](
            out, coarse, gate, offsets,
            out.stride(0), out.stride(1), gate.stride(0), gate.stride(1),
            N, D,
            ROWS=_ROWS,
            BLOCK_D=block_d,
            num_warps=2,
        )
    return out


def _splits(out: torch.Tensor) -> bool:
    """Whether three bf16 products are exact enough, and there is hardware for them: `out` rounds far more coarsely."""
    if out.dtype == torch.float32:
        return False
    return INTERPRET or torch.cuda.get_device_capability(out.device) >= (8, 0)
