"""Mirrors fasth3_core/vae/tiling.py: tables, coverage, and blending against a stitch by definition."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import GeometryError
from comfyui_fasth3.fasth3_core.vae.tiling import MIN_OVERLAP, TILE, Stitcher, axis_tiles
from comfyui_fasth3.kernels.stitch_tiles import Lines, stitch_tiles
from hypothesis import given, settings
from hypothesis import strategies as st

TABLE = {
    768: ((0, 160, 336, 512), (96, 80, 80)),
    1344: ((0, 176, 352, 528, 704, 896, 1088), (80, 80, 80, 80, 64, 64)),
    480: ((0, 112, 224), (144, 144)),
    832: ((0, 192, 384, 576), (64, 64, 64)),
    1024: ((0, 192, 384, 576, 768), (64, 64, 64, 64)),
    320: ((0, 64), (192,)),
    256: ((0,), ()),
    32: ((0,), ()),
}


@pytest.mark.parametrize("length", TABLE)
def test_tile_table(length):
    axis = axis_tiles(length)
    assert (axis.starts, axis.overlaps) == TABLE[length]
    assert axis.size == min(length, TILE)


@pytest.mark.parametrize("length", range(32, 2049, 32))
def test_tiles_cover_the_axis(length):
    axis = axis_tiles(length)
    assert axis.starts[0] == 0 and axis.starts[-1] + axis.size == length
    assert all(MIN_OVERLAP <= overlap < TILE for overlap in axis.overlaps)
    assert max(axis.overlaps, default=0) - min(axis.overlaps, default=0) <= 16
    assert all(value % 16 == 0 for value in axis.starts)
    latents = axis.in_latents()
    assert [start * 16 for start in latents.starts] == list(axis.starts) and latents.ends[-1] * 16 == length


@pytest.mark.parametrize("length", [0, 8, 250, 1000])
def test_other_sizes_are_refused(length):
    with pytest.raises(GeometryError, match=f"{length} pixels"):
        axis_tiles(length)


def stitched(tiles, rows, columns, dtype=torch.float32):
    first = tiles[0, 0]
    canvas = torch.full((*first.shape[:2], rows.length, columns.length), float("nan"), dtype=dtype)
    stitcher = Stitcher(rows, columns, canvas)
    for (r, c), tile in sorted(tiles.items()):
        stitcher.place(r, c, tile)
    return canvas


def random_tiles(rows, columns, seed, channels=2, frames=3):
    generator = torch.Generator().manual_seed(seed)
    grid = ((r, c) for r in range(len(rows.starts)) for c in range(len(columns.starts)))
    return {at: torch.randn(channels, frames, rows.size, columns.size, generator=generator) for at in grid}


def stitch_by_definition(tiles, rows, columns):
    """Blend the top strip with the raw tile above, then the left strip with the raw left one, trim, concatenate."""
    out_rows = []
    for r in range(len(rows.starts)):
        parts = []
        for c in range(len(columns.starts)):
            tile = tiles[r, c].clone()
            if r:
                extent = rows.overlaps[r - 1]
                for j in range(extent):
                    above = tiles[r - 1, c][:, :, rows.size - extent + j]
                    tile[:, :, j] = above * (1 - j / extent) + tile[:, :, j] * (j / extent)
            if c:
                extent = columns.overlaps[c - 1]
                for j in range(extent):
                    left = tiles[r, c - 1][..., columns.size - extent + j]
                    tile[..., j] = left * (1 - j / extent) + tile[..., j] * (j / extent)
            bottom = rows.overlaps[r] if r < len(rows.overlaps) else 0
            right = columns.overlaps[c] if c < len(columns.overlaps) else 0
            parts.append(tile[:, :, : rows.size - bottom, : columns.size - right])
        out_rows.append(torch.cat(parts, dim=3))
    return torch.cat(out_rows, dim=2)


@pytest.mark.parametrize("size", [(256, 320), (480, 480), (768, 1344), (320, 832)])
def test_stitch_follows_the_definition(size):
    rows, columns = (axis_tiles(side).in_latents() for side in size)
    tiles = random_tiles(rows, columns, seed=size[1])
    torch.testing.assert_close(
        stitched(tiles, rows, columns), stitch_by_definition(tiles, rows, columns), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("size", [(256, 320), (272, 464), (480, 832)])
def test_frames_are_stitched_as_canvases_are(size):
    """Decoded patches go another way than encoded tiles, through the kernels' op, and follow the same definition."""
    rows, columns = (axis_tiles(side) for side in size)
    tiles = random_tiles(rows, columns, seed=7, channels=3, frames=4)
    patches = torch.stack([
        tile.unflatten(3, (-1, 16)).unflatten(2, (-1, 16)).permute(2, 4, 0, 1, 3, 5).flatten(2).flatten(0, 1)
        for tile in tiles.values()
    ])
    out, broken = torch.full((3, 4, *size), float("nan")), torch.zeros(1, dtype=torch.int32)
    lines = [Lines.of(axis.starts, axis.size, torch.device("cpu")) for axis in (rows, columns)]
    stitch_tiles(patches, *lines, 0, out, broken)
    torch.testing.assert_close(out, stitched(tiles, rows, columns), atol=2e-6, rtol=0)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 64), st.integers(1, 64))
def test_partition_of_unity(height, width):
    """Equal tiles stitch to themselves, and every pixel is written: the weights of a pixel sum to 1."""
    rows, columns = axis_tiles(32 * height).in_latents(), axis_tiles(32 * width).in_latents()
    grid = ((r, c) for r in range(len(rows.starts)) for c in range(len(columns.starts)))
    tiles = {at: torch.ones(1, 1, rows.size, columns.size) for at in grid}
    assert (stitched(tiles, rows, columns) - 1).abs().max() <= 1e-6


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 64), st.integers(1, 64))
def test_overlapping_tiles_of_one_picture_stitch_to_it(height, width):
    rows, columns = axis_tiles(32 * height).in_latents(), axis_tiles(32 * width).in_latents()
    picture = torch.randn(
        1, 2, rows.length, columns.length, generator=torch.Generator().manual_seed(height * 64 + width)
    )
    grid = ((r, c) for r in range(len(rows.starts)) for c in range(len(columns.starts)))
    tiles = {(r, c): picture[..., rows.tile(r), columns.tile(c)] for r, c in grid}
    torch.testing.assert_close(stitched(tiles, rows, columns), picture, atol=2e-6, rtol=0)


def test_tiles_are_left_as_they_were():
    rows, columns = axis_tiles(320), axis_tiles(320)
    tiles = random_tiles(rows, columns, seed=1)
    before = {at: tile.clone() for at, tile in tiles.items()}
    stitched(tiles, rows, columns)
    assert all(torch.equal(tiles[at], before[at]) for at in tiles)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_blend_loses_no_more_than_one_rounding_a_step(dtype):
    rows, columns = axis_tiles(480).in_latents(), axis_tiles(480).in_latents()
    tiles = {at: tile.to(dtype) for at, tile in random_tiles(rows, columns, seed=2).items()}
    exact = stitch_by_definition({at: tile.double() for at, tile in tiles.items()}, rows, columns)
    error = (stitched(tiles, rows, columns, dtype).double() - exact).abs().max()
    # two blends, each rounding its weight and its result: values stay under 5 in magnitude
    assert error <= 4 * 5 * torch.finfo(dtype).eps
