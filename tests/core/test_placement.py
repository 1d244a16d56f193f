"""Mirrors fasth3_core/weights/placement.py: what "auto" means for what is free."""

from itertools import pairwise

import pytest
from comfyui_fasth3.fasth3_core.weights.placement import (
    GIB,
    RESIDENT,
    Offload,
    Placement,
    Room,
    Sizes,
    choose,
    streamed_blocks,
)

SIZES = Sizes(top=GIB, blocks=(GIB,) * 10)
WORKING = GIB // 2
EVERY = tuple(range(10))


def chosen(device_gib, host_gib=1000, now=RESIDENT, **offload):
    room = Room(device=int(device_gib * GIB), host=int(host_gib * GIB))
    return choose(Offload(**offload), SIZES, room, WORKING, now)


def stay(placement):
    return len(SIZES.blocks) - len(placement.streamed)


@pytest.mark.parametrize("free, blocks", [(12, 10), (11.5, 10), (11.4, 7), (8, 4), (4.5, 1), (3.5, 0)])
def test_as_many_blocks_stay_as_fit(free, blocks):
    """Beside 1 GiB that always stays, half a GiB of activations and two slots."""
    assert stay(chosen(free)) == blocks


def test_a_placement_moves_for_more_than_two_blocks_only():
    held = chosen(6.5)
    assert stay(held) == 3
    assert [stay(chosen(free, now=held)) for free in (5.5, 6.5, 7.5, 8.5, 9.5)] == [2, 3, 3, 3, 6]
    assert stay(chosen(8.5, now=held, slots=3)) == 4, "other slots are another placement"


@pytest.mark.parametrize("host, mapped", [(14.5, False), (13.5, True), (9, True)])
def test_auto_leaves_host_memory_to_others(host, mapped):
    assert chosen(3.5, host).mapped is mapped


def test_a_host_that_wants_memory_free_streams_every_block():
    room = Room(device=100 * GIB, host=1000 * GIB, spare_device=True)
    assert choose(Offload(), SIZES, room, WORKING, Placement(streamed=EVERY[5:], slots=2)).streamed == EVERY


@pytest.mark.parametrize(("total", "resident"), [(50, 0), (50, 1), (50, 2), (50, 7), (50, 33), (50, 49), (7, 3)])
def test_blocks_that_stay_are_spread_over_the_model(total, resident):
    """As many as were counted on, from the first to the last, at distances that differ by no more than one."""
    stay = sorted(set(range(total)) - set(streamed_blocks(total, resident)))
    assert len(stay) == resident and stay[:1] == [0] * min(1, resident) and (resident < 2 or stay[-1] == total - 1)
    distances = [b - a for a, b in pairwise(stay)]
    assert not distances or max(distances) - min(distances) <= 1


def test_no_block_streams_where_all_stay():
    assert streamed_blocks(7, 7) == streamed_blocks(7, 9) == ()
