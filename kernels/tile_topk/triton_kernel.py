"""Triton tile_topk. One program a row of scores: its columns stay in registers while a threshold is searched by bits.

Scores become unsigned keys of the same order. The search builds the largest threshold that at least k keys reach, from
its highest bit down, and stops when exactly k reach it: about 17 counts for ordinary scores, never more than 32. Keys
above the threshold are listed, and as many equal to it as there is room for, lowest tile first. Nothing is sorted.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim

_MAX_COLUMNS = 1 << 15
"""Two running counts share a 32-bit integer."""

_COLUMNS_PER_WARP = 2048
"""64 registers a thread. Within one warp a count needs no shared memory."""


@triton.jit
def _tile_topk_kernel(
    scores_ptr, index_ptr,
    stride_sh, stride_sv,
    V, C, K, first, kept,
    BLOCK_C: tl.constexpr,
):
    """scores_ptr: the first of C candidate columns. `first` tiles before them are listed whatever their scores."""
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_C)
    candidate = column < C
    score = tl.load(scores_ptr + head * stride_sh + tile * stride_sv + column, mask=candidate, other=0.0)
    score = score.to(tl.float32)
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 is equal to 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(score != score, 0x7FFFFFFF, ordered)  # a NaN of either sign is the best score
    key = ordered.to(tl.uint32, bitcast=True) ^ 0x80000000
    key = tl.where(candidate, key, 0)  # below every score: -inf is 0x007fffff

    threshold = tl.zeros([], tl.uint32)
    reaching = C
    bit = tl.full([], 0x80000000, tl.uint32)
    while (reaching != kept) & (bit != 0):
        higher = threshold | bit
        n = tl.sum((key >= higher).to(tl.int32), axis=0)
        threshold = tl.where(n >= kept, higher, threshold)
        reaching = tl.where(n >= kept, n, reaching)
        bit = bit >> 1

    above = candidate & (key > threshold)
    equal = candidate & (key == threshold)
    room = kept - tl.sum(above.to(tl.int32), axis=0)
    running = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    num_equal = running >> 16
    listed = above | (equal & (num_equal <= room))
    place = (running & 0xFFFF) + tl.minimum(num_equal, room) - 1

    index_ptr += (head * V + tile) * K
    tl.store(index_ptr + first + place, first + column, mask=listed)
    for start in range(0, first, BLOCK_C):
        tl.store(index_ptr + start + column, start + column, mask=start + column < first)


def tile_topk_triton(scores, num_prefix, kept, mode):
    check_last_dim("tile_topk", scores=scores)
    H, V, N = scores.shape
    K = kept + num_prefix
    first = num_prefix if mode == "exempt" else 0
    columns = N - first
    if columns > _MAX_COLUMNS:
        raise ValueError(f"tile_topk: {columns} candidate tiles a row, expected at most {_MAX_COLUMNS}")
    block = max(32, triton.next_power_of_2(columns))
    index = torch.empty(H, V, K, dtype=torch.int32, device=scores.device)
    with torch.cuda.device_of(scores):
        _tile_topk_kernel[(V, H)](
            scores[..., first:], index,
            scores.stride(0), scores.stride(1),
            V, columns, K, first, K - first,
            BLOCK_C=block,
            num_warps=max(1, block // _COLUMNS_PER_WARP),
        )
    return index, torch.full((H, V), K, dtype=torch.int32, device=scores.device)
