"""Mirrors fasth3_core/vsa/tiles.py: known geometries, then any geometry."""

import math
from collections import Counter

import pytest
import torch
from comfyui_fasth3.fasth3_core.config import TILE_SHAPES
from comfyui_fasth3.fasth3_core.errors import GeometryError
from comfyui_fasth3.fasth3_core.vsa.tiles import check_tiles, tile_plan
from hypothesis import given, settings
from hypothesis import strategies as st

# name: segments, token grid, tile, prefix sizes, tokens of a video tile -> how many such tiles
ORACLES = {
    "720P": ((512, 1760, 400), (30, 22, 40), 256, [256] * 8 + [224, 256, 144], {256: 70, 192: 35, 128: 10, 96: 5}),
    "TINY": ((7, 5, 3), (8, 4, 6), 256, [7, 5, 3], {96: 2}),
    "PROD64": ((300, 0, 414), (37, 24, 42), 64, [64] * 4 + [44] + [64] * 6 + [30], {64: 540, 32: 54, 16: 60, 8: 6}),
    "PROD256": ((300, 0, 414), (37, 24, 42), 256, [256, 44, 256, 158], {256: 135, 64: 42, 16: 3}),
    "PAIR": ((70, 30), (4, 4, 8), 64, [64, 6, 30], {64: 2}),
    "BWD": ((64, 32, 16), (16, 8, 12), 256, [64, 32, 16], {256: 4, 128: 4}),
    "MINI": ((3,), (5, 2, 5), 64, [3], {32: 1, 8: 2, 2: 1}),
}


@pytest.mark.parametrize("name", ORACLES)
def test_known_sizes(name):
    segments, grid, tile_size, prefix, video = ORACLES[name]
    plan = tile_plan(segments, grid, tile_size)
    assert list(plan.sizes[: plan.num_prefix_tiles]) == prefix
    assert Counter(plan.sizes[plan.num_prefix_tiles :]) == video
    assert plan.num_video_tiles == sum(video.values())
    assert plan.num_tokens == sum(segments) + math.prod(grid) == sum(plan.sizes)
    assert plan.tile_sizes().dtype == torch.int64 and plan.tile_sizes().tolist() == list(plan.sizes)


def test_known_order_720p():
    plan = tile_plan((512, 1760, 400), (30, 22, 40), 256)
    assert (plan.num_tokens, plan.num_prefix_tiles, plan.num_video_tiles) == (29072, 11, 120)


def test_known_order_tiny():
    slots = tile_plan((7, 5, 3), (8, 4, 6), 256).untile_index().tolist()
    assert slots[:15] == [*range(7), *range(256, 261), 512, 513, 514]
    assert slots[15] == 768


def test_known_order_tiny64():
    plan = tile_plan((70, 5, 130), (9, 10, 13), 64)
    slab = [64, 64, 64, 16, 64, 64, 64, 16, 32, 32, 32, 8]
    assert list(plan.sizes) == [64, 6, 5, 64, 64, 2, *slab, *slab, *(n // 4 for n in slab)]
    assert min(plan.sizes[6:]) == 2 and plan.num_tokens == 1375
    slots = plan.untile_index().tolist()
    assert [slots[row] for row in (64, 69, 70, 75)] == [64, 69, 128, 192]
    assert slots[205:219] == [384, 385, 386, 387, 448, 449, 450, 451, 512, 513, 514, 515, 576, 388]
    assert slots[-1] == 2625
    for row, slot in enumerate(slots[205:]):
        t, h, w = row // 130, row // 13 % 10, row % 13
        assert slot // 64 == 6 + ((t // 4) * 3 + h // 4) * 4 + w // 4


def test_known_order_mini():
    slots = tile_plan((3,), (5, 2, 5), 64).untile_index().tolist()
    first_slab = [slot for row in range(8) for slot in (*range(64 + 4 * row, 68 + 4 * row), 128 + row)]
    assert slots == [0, 1, 2, *first_slab, *range(192, 196), 256, *range(196, 200), 257]


@pytest.mark.parametrize("tile_size", TILE_SHAPES)
def test_a_full_grid_has_only_full_tiles(tile_size):
    plan = tile_plan((), (8, 16, 24), tile_size)
    assert set(plan.sizes) == {tile_size} and plan.num_prefix_tiles == 0


@settings(max_examples=60, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(1, 20)),
    segments=st.lists(st.integers(0, 300), max_size=4).map(tuple),
    tile_size=st.sampled_from(sorted(TILE_SHAPES)),
)
def test_any_geometry(grid, segments, tile_size):
    plan = tile_plan(segments, grid, tile_size)
    S, P, V = plan.num_tokens, plan.num_prefix_tiles, plan.num_video_tiles
    assert sum(-(-n // tile_size) for n in segments) == P
    assert math.prod(-(-n // e) for n, e in zip(grid, TILE_SHAPES[tile_size], strict=True)) == V
    packed = torch.arange(S) * 3
    assert torch.equal(packed[plan.order][plan.inverse], packed)
    assert torch.equal(plan.order[: plan.prefix_len], torch.arange(plan.prefix_len))
    assert plan.offsets.tolist() == [0, *torch.tensor(plan.sizes).cumsum(0).tolist()]
    # the padded numbering agrees with the ranges, and a tile's tokens keep their raster order
    slots = plan.untile_index()
    tile, within = slots // tile_size, slots % tile_size
    assert torch.equal(plan.offsets[tile].long() + within, plan.inverse)
    for a, b in zip(plan.offsets[:-1].tolist(), plan.offsets[1:].tolist(), strict=True):
        assert (plan.order[a:b].diff() > 0).all()
    # every video token is in the box that its coordinates say
    t, h, w = torch.meshgrid(*(torch.arange(n) // e for n, e in zip(grid, TILE_SHAPES[tile_size], strict=True)),
                             indexing="ij")
    boxes = torch.stack([t, h, w], -1).flatten(0, 2)[plan.order[plan.prefix_len :] - plan.prefix_len]
    assert torch.equal(boxes.unique_consecutive(dim=0), boxes.unique(dim=0))
    # parts cut the same ranges
    assert set(plan.offsets.tolist()) <= set(plan.part_offsets.tolist())
    assert plan.part_offsets.diff().min() >= 1 and plan.part_offsets.diff().max() <= 64
    assert torch.equal(plan.part_offsets[plan.first_part.long()], plan.offsets)


@pytest.mark.parametrize("tile_size", TILE_SHAPES)
def test_lists_expand_to_the_same_tokens(tile_size):
    plan = tile_plan((70, 300), (5, 9, 21), tile_size)
    P, V = plan.num_prefix_tiles, plan.num_video_tiles
    index = torch.full((2, V, 5), -1, dtype=torch.int32)
    count = torch.randint(0, 6, (2, V), dtype=torch.int32)
    for h in range(2):
        for i in range(V):
            index[h, i, : count[h, i]] = torch.randperm(P + V)[: count[h, i]].sort().values
    parts, totals = plan.expand(index, count)
    assert parts.dtype == totals.dtype == torch.int32
    assert parts.shape[1] == plan.first_part[-1] - plan.first_part[P]

    def tokens(row, n, offsets):
        assert (row[n:] == -1).all() and (row[:n].diff() > 0).all()
        return [t for r in row[:n].tolist() for t in range(offsets[r], offsets[r + 1])]

    for h in range(2):
        for i in range(V):
            expected = tokens(index[h, i], count[h, i], plan.offsets)
            first = plan.first_part[P]
            for part in range(plan.first_part[P + i] - first, plan.first_part[P + i + 1] - first):
                assert tokens(parts[h, part], totals[h, part], plan.part_offsets) == expected


def test_plans_are_cached_by_geometry_and_device():
    plan = tile_plan((5, 0), (2, 3, 4), 64)
    assert tile_plan([5, 0], [2, 3, 4], 64, "cpu") is plan
    assert tile_plan((5, 0), (2, 3, 4), 64, torch.device("meta")) is not plan


@pytest.mark.parametrize("tile_size", [0, 32, 512])
def test_other_tile_sizes_are_refused(tile_size):
    with pytest.raises(GeometryError, match=rf"tile_size={tile_size}: expected one of \[64, 128, 256\]"):
        tile_plan((), (4, 4, 4), tile_size)


@pytest.mark.parametrize(("segments", "grid"), [((-1,), (1, 1, 1)), ((), (0, 4, 4)), ((), (4, 4))])
def test_impossible_counts_are_refused(segments, grid):
    with pytest.raises(GeometryError, match="expected counts >= 0 and three sizes >= 1"):
        tile_plan(segments, grid, 64)


def test_validation_names_the_numbers():
    check_tiles((65, 3), torch.arange(68), 256, 68)
    with pytest.raises(GeometryError, match=r"tile sizes out of bounds: 2 tiles of 3 to 65 tokens.*expected 1 to 64"):
        check_tiles((65, 3), torch.arange(68), 64, 68)
    with pytest.raises(GeometryError, match="tile sizes out of bounds: 2 tiles of 0 to 3 tokens"):
        check_tiles((3, 0), torch.arange(3), 64, 3)
    with pytest.raises(GeometryError, match=r"tile sizes out of bounds.*3 in all; expected 1 to 64 tokens each and 4"):
        check_tiles((2, 1), torch.arange(4), 64, 4)


@pytest.mark.parametrize(
    ("order", "numbers"),
    [([0, 1, 1], "3 entries, 2 distinct"), ([0, 1, 3], "from 0 to 3"), ([-1, 0, 1], "from -1 to 1"), ([0, 1], "2 en")],
)
def test_an_order_that_is_no_permutation_is_refused(order, numbers):
    with pytest.raises(GeometryError, match=f"not an injective map of 3 tokens.*{numbers}"):
        check_tiles((2, 1), torch.tensor(order), 64, 3)
