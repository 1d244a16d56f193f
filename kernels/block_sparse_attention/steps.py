"""Tile lists -> the steps of a kernel that attends 64 keys at a time without a mask and masks what is left.

Two rows of [H, V, W] steps for every list, ascending: full tiles from the front, each as its first token; what is not
a full tile from the back, in pieces of at most 32 tokens, each as 64 x its first token + its length.
"""

import torch
import triton
import triton.language as tl

STEP: int = 64
PIECE: int = 32
_MAX_TOKENS = 1 << 25


@triton.jit
def _steps_kernel(
    index_ptr, count_ptr, offsets_ptr, steps_ptr, lengths_ptr,
    K, W,
    STEP: tl.constexpr, PIECE: tl.constexpr, BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + row)
    index_ptr += row * K
    front_ptr = steps_ptr + row * W
    back_ptr = front_ptr + (W - 1)
    place = tl.arange(0, BLOCK_K)
    num_full = 0
    num_pieces = 0
    for first in range(0, count, BLOCK_K):
        inside = first + place < count
        tile = tl.load(index_ptr + first + place, mask=inside, other=0)
        start = tl.load(offsets_ptr + tile, mask=inside, other=0)
        size = tl.load(offsets_ptr + tile + 1, mask=inside, other=0) - start
        full = size == STEP
        pieces = tl.where(full, 0, (size + PIECE - 1) // PIECE)  # 0, 1 or 2; 0 past the end
        running = tl.cumsum(full.to(tl.int32) + (pieces << 16), axis=0)
        tl.store(front_ptr + num_full + (running & 0xFFFF) - 1, start, mask=full)
        piece_ptr = back_ptr - (num_pieces + (running >> 16) - pieces)
        tl.store(piece_ptr, start * STEP + tl.minimum(size, PIECE), mask=pieces >= 1)
        tl.store(piece_ptr - 1, (start + PIECE) * STEP + size - PIECE, mask=pieces == 2)
        num_full += tl.sum(full.to(tl.int32), axis=0)
        num_pieces += tl.sum(pieces, axis=0)
    tl.store(lengths_ptr + 2 * row, num_full)
    tl.store(lengths_ptr + 2 * row + 1, num_pieces)


def steps_of(offsets, index, count, num_tokens):
    """Tiles of at most 64 tokens.

    Returns:
        steps [H, V, 2 K] int32, lengths [H, V, 2] int32: how many full tiles and how many pieces.
    """
    if num_tokens > _MAX_TOKENS:
        raise ValueError(f"block_sparse_attention: {num_tokens} tokens, expected at most {_MAX_TOKENS}")
    H, V, K = index.shape
    steps = torch.empty(H, V, 2 * K, dtype=torch.int32, device=index.device)
    lengths = torch.empty(H, V, 2, dtype=torch.int32, device=index.device)
    with torch.cuda.device_of(index):
        _steps_kernel[(H * V,)](
            index.contiguous(), count.contiguous(), offsets, steps, lengths,
            K, 2 * K,
            STEP=STEP, PIECE=PIECE, BLOCK_K=128,
            num_warps=1,
        )
    return steps, lengths
