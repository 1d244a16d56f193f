"""Tile lists -> full 64-key steps, on the device: ragged tiles are packed together instead of padded one by one.

A list's steps come in this order, so that a kernel masks at its beginning and nowhere else:

    masked    of granules of which some are short or empty
    ragged    of whole granules
    full      one full tile each

A granule is up to 8 adjacent rows of one ragged tile. A tile's whole granules go together in pieces of 4, 2 and 1, so
that one copy brings up to 32 rows. Pieces are laid from the end of the ragged steps by falling size, which aligns each.
H heads, V video tiles, N tiles, K listed tiles, L = H V lists.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

STEP = tl.constexpr(64)
"""Keys of a step."""

GRANULE = tl.constexpr(8)
"""Rows of a granule: the height of a swizzle atom in shared memory, so one copy can fill any eighth of a step."""

ROW_SHIFT = tl.constexpr(4)
"""A granule is coded as first row << 4 | kind in 32 bits.

Kind 0 to 7: so many rows are of the list. 8: all of them. PAIR and FOUR: likewise, and a piece of 2 or 4 begins here.
"""

KIND_MASK = tl.constexpr((1 << ROW_SHIFT.value) - 1)

_MAX_TOKENS = 1 << 27

PAIR = tl.constexpr(9)
FOUR = tl.constexpr(10)


@dataclass(frozen=True)
class PackedLists:
    """Every list has at least one step; an empty one has a step of eight empty granules."""

    granules: torch.Tensor
    """[L, 8 K] int32 codes; those of ragged step j are 8 j to 8 j + 8. Empty ones start at row S, where no token is."""
    full: torch.Tensor
    """[L, K] int32: first row of each full tile, ascending."""
    steps: torch.Tensor
    """[L, 3] int32: masked steps, ragged steps with the masked ones, all steps."""


def pack_lists(offsets: torch.Tensor, index: torch.Tensor, count: torch.Tensor, num_tokens: int) -> PackedLists:
    """Pack lists as `block_sparse_attention` takes them. Tiles have at most 64 tokens. Never waits for the device.

    Raises:
        ValueError: more tokens than a granule's code can number.
    """
    if num_tokens > _MAX_TOKENS:
        raise ValueError(f"block_sparse_attention: {num_tokens} tokens, expected at most {_MAX_TOKENS}")
    num_lists, K = count.numel(), index.shape[-1]
    granules = torch.empty(num_lists, STEP.value // GRANULE.value * K, dtype=torch.int32, device=index.device)
    full = torch.empty(num_lists, K, dtype=torch.int32, device=index.device)
    steps = torch.empty(num_lists, 3, dtype=torch.int32, device=index.device)
    with torch.cuda.device_of(index):
        _pack_lists_kernel[(num_lists,)](
            offsets, index.contiguous(), count.contiguous(), granules, full, steps, num_tokens, K,
            BLOCK_K=triton.next_power_of_2(K), num_warps=1 if K <= 512 else 4,
        )  # fmt: skip
    return PackedLists(granules, full, steps)


@triton.jit
def _store_pieces(codes_ptr, end, start, present, LENGTH: tl.constexpr, kind):
    """Write the granules of pieces of one length in front of `end`; return where they begin."""
    first = end - LENGTH * tl.sum(present, 0)
    place = first + LENGTH * (tl.cumsum(present, 0) - present)
    tl.store(codes_ptr + place, (start << ROW_SHIFT) | kind, mask=present > 0)
    for i in tl.static_range(1, LENGTH):
        tl.store(codes_ptr + place + i, (start + i * GRANULE << ROW_SHIFT) | GRANULE, mask=present > 0)
    return first


@triton.jit(do_not_specialize=["num_tokens", "K"])
def _pack_lists_kernel(
    offsets_ptr, index_ptr, count_ptr, granules_ptr, full_ptr, steps_ptr, num_tokens, K, BLOCK_K: tl.constexpr
):
    """One program per list."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    listed = k < tl.load(count_ptr + row)
    tile = tl.load(index_ptr + row * K + k, mask=listed, other=0)  # [BLOCK_K]
    start = tl.load(offsets_ptr + tile, mask=listed, other=0)
    size = tl.load(offsets_ptr + tile + 1, mask=listed, other=0) - start

    is_full = (size == STEP).to(tl.int32)
    place = tl.cumsum(is_full, 0) - is_full
    tl.store(full_ptr + row * K + place, start, mask=is_full > 0)

    ragged = tl.where(is_full > 0, 0, size)
    whole = ragged // GRANULE
    four, pair, one = whole // 4, whole // 2 % 2, whole % 2
    short = (ragged % GRANULE > 0).to(tl.int32)
    num_full = tl.sum(is_full, 0)
    granules = tl.sum(whole + short, 0)
    per_step: tl.constexpr = STEP // GRANULE
    # an empty list gets one step, so that the kernel that walks the steps has no second path
    ragged_steps = tl.where(granules + num_full == 0, 1, tl.cdiv(granules, per_step))
    codes_ptr = granules_ptr + row * (per_step * K)
    end = ragged_steps * per_step
    end = _store_pieces(codes_ptr, end, start, four, 4, FOUR)
    end = _store_pieces(codes_ptr, end, start + four * 4 * GRANULE, pair, 2, PAIR)
    end = _store_pieces(codes_ptr, end, start + (whole - one) * GRANULE, one, 1, GRANULE)
    masked_steps = tl.cdiv(end, per_step)
    end = _store_pieces(codes_ptr, end, start + whole * GRANULE, short, 1, ragged % GRANULE)
    empty = tl.arange(0, per_step)
    tl.store(codes_ptr + empty, tl.zeros_like(empty) + (num_tokens << ROW_SHIFT), mask=empty < end)

    tl.store(steps_ptr + row * 3, masked_steps)
    tl.store(steps_ptr + row * 3 + 1, ragged_steps)
    tl.store(steps_ptr + row * 3 + 2, ragged_steps + num_full)
