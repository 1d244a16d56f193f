"""Triton tile_mean. One program a head and tile: every value is read once, and a tile is summed in one fixed order.

Heads vary fastest over programs, so that the tokens of a tile, which lie side by side, are read at about the same time.
"""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim

_ROWS = 8
"""Tokens read at once by a program of one warp: few registers, so many programs. On an H200 3.3 TB/s; 64 tokens in four
warps 1.7, 16 in one 2.8, 16 in four 1.9.
"""


@triton.jit
def head_and_tile(offsets_ptr):
    """Of a program on a grid of heads and tiles: its head and tile, the tile's first token and number of tokens.

    All but the number are int64, before any stride: a slice of [S, 3, 56, 128] passes 2**31 elements at 99,865 tokens.
    """
    tile = tl.program_id(1).to(tl.int64)
    start = tl.load(offsets_ptr + tile)
    size = tl.load(offsets_ptr + tile + 1) - start
    return tl.program_id(0).to(tl.int64), tile, start.to(tl.int64), size


@triton.jit
def _tile_mean_kernel(
    x_ptr, offsets_ptr, out_ptr,
    stride_xs, stride_xh,
    N, D,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):
    head, tile, start, size = head_and_tile(offsets_ptr)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_D)
    x_ptr += start * stride_xs + head * stride_xh
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(0, size, ROWS):
        rows = (first + row)[:, None]
        inside = (rows < size) & (col[None, :] < D)
        total += tl.load(x_ptr + rows * stride_xs + col[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / size  # [BLOCK_D]
    tl.store(out_ptr + (head * N + tile) * D + col, mean, mask=col < D)


def tile_mean_triton(x, offsets, tile_size):
    check_last_dim("tile_mean", x=x)
    _, H, D = x.shape
    N = offsets.numel() - 1
    out = torch.empty(H, N, D, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _tile_mean_kernel[(H, N)](
            x, offsets, out,
            x.stride(0), x.stride(1),
            N, D,
            ROWS=_ROWS,
            BLOCK_D=triton.next_power_of_2(D),
            num_warps=1,
        )
    return out
