"""Tile lists -> the steps of a kernel that attends 64 keys at a time.

A full tile is a step of its own and needs no mask. The others are cut into granules of at most 8 tokens, and 8 granules
make a step, whatever tiles they come from. Lists that random data leads to at 124 frames have 77 tiles, 70 % of them
full: 60 steps.
"""

import torch
import triton
import triton.language as tl

STEP: int = 64
GRANULE: int = 8
_MAX_TOKENS = 1 << 27
"""A granule is one 32-bit integer, 16 x its first token + its length."""


@triton.jit
def _steps_kernel(
    index_ptr, count_ptr, offsets_ptr, full_ptr, granules_ptr, lengths_ptr,
    K,
    STEP: tl.constexpr, GRANULE: tl.constexpr, BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + row)
    index_ptr += row * K
    full_ptr += row * K
    granules_ptr += row * K * (STEP // GRANULE)
    place = tl.arange(0, BLOCK_K)
    num_full = 0
    num_granules = 0
    for first in range(0, count, BLOCK_K):
        inside = first + place < count
        tile = tl.load(index_ptr + first + place, mask=inside, other=0)
        start = tl.load(offsets_ptr + tile, mask=inside, other=0)
        size = tl.load(offsets_ptr + tile + 1, mask=inside, other=0) - start
        full = (size == STEP).to(tl.int32)
        granules = tl.where(size == STEP, 0, tl.cdiv(size, GRANULE))  # 0 past the end
        running = tl.cumsum(full + (granules << 16), axis=0)
        tl.store(full_ptr + num_full + (running & 0xFFFF) - 1, start, mask=size == STEP)
        to_ptr = granules_ptr + num_granules + (running >> 16) - granules
        for g in tl.static_range(STEP // GRANULE):
            length = tl.minimum(size - g * GRANULE, GRANULE)
            tl.store(to_ptr + g, (start + g * GRANULE) * 16 + length, mask=g < granules)
        num_full += tl.sum(full, axis=0)
        num_granules += tl.sum(granules, axis=0)
    tl.store(lengths_ptr + 2 * row, num_full)
    tl.store(lengths_ptr + 2 * row + 1, num_granules)


def steps_of(offsets, index, count, num_tokens):
    """Steps of lists of tiles of at most 64 tokens.

    Returns:
        full [H, V, K] int32, first tokens of full tiles; granules [H, V, 8 K] int32; lengths [H, V, 2] int32, how many
        there are of each.

    Raises:
        ValueError: more tokens than a granule can number.
    """
    if num_tokens > _MAX_TOKENS:
        raise ValueError(f"block_sparse_attention: {num_tokens} tokens, expected at most {_MAX_TOKENS}")
    H, V, K = index.shape
    full = torch.empty(H, V, K, dtype=torch.int32, device=index.device)
    granules = torch.empty(H, V, K * STEP // GRANULE, dtype=torch.int32, device=index.device)
    lengths = torch.empty(H, V, 2, dtype=torch.int32, device=index.device)
    with torch.cuda.device_of(index):
        _steps_kernel[(H * V,)](
            index.contiguous(), count.contiguous(), offsets, full, granules, lengths,
            K,
            STEP=STEP, GRANULE=GRANULE, BLOCK_K=128,
            num_warps=1,
        )
    return full, granules, lengths
