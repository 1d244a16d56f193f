"""Triton stitch_tiles. One program a colour of a frame and 16 x 128 pixels of it, 32 bytes of a patch a row.

Tiles are read once where they do not overlap, and nothing between them and the finished frames is written.
"""

import torch
import triton
import triton.language as tl

from .reference import FRAMES, SIDE

BLOCK_X = 128
NUM_WARPS = 4


@triton.jit
def _pixels(
    tiles_ptr, tile, y, x, plane, t, N, h, w, mask, SIDE: tl.constexpr, PATCH: tl.constexpr
):
    """[16, 128] at lines y and x of their tiles; `plane` is the colour and the frame inside a patch."""
    patch = (t * h + y[:, None] // SIDE) * w + x[None, :] // SIDE
    inside = (plane * SIDE + y[:, None] % SIDE) * SIDE + x[None, :] % SIDE
    at = (tile.to(tl.int64) * N + patch) * PATCH + inside
    return tl.load(tiles_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _stitch_tiles_kernel(
    tiles_ptr, out_ptr, previous_ptr, scale_ptr, shift_ptr, broken_ptr,
    row_tile_ptr, row_at_ptr, row_before_ptr, row_weight_ptr,
    column_tile_ptr, column_at_ptr, column_before_ptr, column_weight_ptr,
    K, N, h, w, H, W, first, count, fading,
    PIXELS: tl.constexpr, FRAMES: tl.constexpr, SIDE: tl.constexpr, BLOCK_X: tl.constexpr,
):
    PATCH: tl.constexpr = 3 * FRAMES * SIDE * SIDE
    index = tl.program_id(2) // 3
    colour = tl.program_id(2) % 3
    t = (first + index) // FRAMES
    plane = colour * FRAMES + (first + index) % FRAMES
    y = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    there = x < W
    row_tile = tl.load(row_tile_ptr + y)
    row_at = tl.load(row_at_ptr + y)
    down = tl.load(row_weight_ptr + y)[:, None]
    column_tile = tl.load(column_tile_ptr + x, mask=there, other=0)
    column_at = tl.load(column_at_ptr + x, mask=there, other=0)
    right = tl.load(column_weight_ptr + x, mask=there, other=0.0)[None, :]
    inside = there[None, :] & (y < H)[:, None]

    tile = row_tile[:, None] * K + column_tile[None, :]
    own = _pixels(tiles_ptr, tile, row_at, column_at, plane, t, N, h, w, inside, SIDE, PATCH)  # [16, 128]
    row_before = tl.load(row_before_ptr + y)
    mask = inside & (down > 0)
    above = _pixels(tiles_ptr, tile - K, row_before, column_at, plane, t, N, h, w, mask, SIDE, PATCH)
    value = tl.where(mask, own + down * (above - own), own)
    column_before = tl.load(column_before_ptr + x, mask=there, other=0)
    mask = inside & (right > 0)
    beside = _pixels(tiles_ptr, tile - 1, row_at, column_before, plane, t, N, h, w, mask, SIDE, PATCH)
    value = tl.where(mask, value + right * (beside - value), value)

    pixel = y[:, None].to(tl.int64) * W + x[None, :]
    size = H.to(tl.int64) * W
    if index < fading:
        faded = tl.load(previous_ptr + (colour * fading + index) * size + pixel, mask=inside, other=0.0).to(tl.float32)
        value += (1 - index / fading) * (faded - value)
    wrong = inside & ~(tl.abs(value) < float("inf"))  # NaN is not below it either
    if tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0) > 0:
        tl.store(broken_ptr, 1)
    if PIXELS:
        value = value * tl.load(scale_ptr + colour) + tl.load(shift_ptr + colour)
        value = tl.minimum(tl.maximum(value, 0.0), 1.0)
    tl.store(out_ptr + (colour * count + index) * size + pixel, value.to(out_ptr.dtype.element_ty), mask=inside)


def stitch_tiles_triton(tiles, rows, columns, first, out, broken, scale=None, shift=None, previous=None):
    _, count, H, W = out.shape
    fading = 0 if previous is None else previous.shape[1]
    pixels = scale is not None
    with torch.cuda.device_of(tiles):
        _stitch_tiles_kernel[(triton.cdiv(W, BLOCK_X), H // SIDE, 3 * count)](
            tiles, out, previous if fading else out, scale if pixels else broken, shift if pixels else broken, broken,
            rows.tile, rows.at, rows.before, rows.weight,
            columns.tile, columns.at, columns.before, columns.weight,
            columns.tiles, tiles.shape[1], rows.size // SIDE, columns.size // SIDE, H, W, first, count, fading,
            PIXELS=pixels, FRAMES=FRAMES, SIDE=SIDE, BLOCK_X=BLOCK_X, num_warps=NUM_WARPS,
        )  # fmt: skip
