"""What fits: where the weights are kept and how many tokens go through a product at a time, on what a machine has."""

from dataclasses import replace
from typing import Any

from .errors import ConfigError
from .model.blocks import PASS_ROWS
from .packing.geometry import CLIP_FRAMES, FPS, MIN_FRAMES, snap_side
from .planning import Wanted, plan
from .planning_sizes import num_block_parameters
from .weights.placement import RESIDENT, Offload, Placement, Room, choose

PASSES = (PASS_ROWS, PASS_ROWS // 2, PASS_ROWS // 4)
"""Tokens a pass, the first that fits. Fewer than the last save nothing: the attention is larger then."""


def fit(wanted: Wanted, offload: Offload, room: Room, now: Placement = RESIDENT) -> tuple[Wanted, Placement]:
    """The request with the most tokens a pass that fit, and where the blocks are then kept.

    Args:
        now: how the weights are placed, see `placement.choose`.

    Raises:
        ConfigError: nothing fits; says by how much, and what would.
    """
    for rows in PASSES[:-1]:
        tried = replace(wanted, pass_rows=rows)
        try:
            return tried, choose(offload, wanted.sizes, room, plan(tried).run.working, now)
        except ConfigError:
            continue
    least = replace(wanted, pass_rows=PASSES[-1])
    return least, choose(
        offload, wanted.sizes, room, plan(least).run.working, now, lambda budget: alternatives(wanted, budget)
    )


def alternatives(wanted: Wanted, budget: int) -> list[str]:
    """What would fit into `budget` bytes of a device with every block streamed: shorter, smaller, quantised."""

    def needs(**changes: Any) -> int:
        changed = replace(wanted, **changes)
        sizes = changed.sizes
        every = Placement(streamed=tuple(range(len(sizes.blocks))), slots=2)
        return sizes.needed(every, plan(replace(changed, pass_rows=PASSES[-1])).run.working)

    said = []
    shorter = next(
        (n for n in range(wanted.frames - CLIP_FRAMES, MIN_FRAMES - 1, -CLIP_FRAMES) if needs(frames=n) <= budget), None
    )
    if shorter is not None:
        said.append(f"{shorter} frames ({shorter / FPS:.1f} s) at this size")
    for share in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        width, height = snap_side(wanted.width * share), snap_side(wanted.height * share)
        if needs(width=width, height=height) <= budget:
            said.append(f"{width}x{height} at {wanted.frames} frames")
            break
    # int8 halves what bf16 takes; a quantised file is near its floor already
    params = num_block_parameters(wanted.config)
    if max(wanted.sizes.blocks) > 1.5 * params:
        halved = replace(wanted.sizes, blocks=tuple(params for _ in wanted.sizes.blocks))
        if needs(sizes=halved) <= budget:
            said.append("an int8 file")
    return said
