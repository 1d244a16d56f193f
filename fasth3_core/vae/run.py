"""One decode or encode under way: how many tiles a call takes, progress, interruption."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

log = logging.getLogger("fasth3.vae")

AUTO_TILE_BATCH = {"cuda": 7}
"""Tiles a call when tile_batch is 0; devices not named take 1. Seven tiles are 98.3 blocks of 128 rows: on an H200 the
products end in whole rounds of its multiprocessors, 3.60 s against 3.63 with four."""

Progress = Callable[[int, int], None]
"""Called as (tiles done, tiles in all)."""


def nothing(*_) -> None:
    return None


@dataclass
class Run:
    """State of one decode or encode."""

    tile_batch: int
    """As the caller asked: 0 lets the device decide."""
    device: torch.device
    on_chunk: Progress
    check_interrupt: Callable[[], None]
    total: int
    done: int = 0
    tiles: int = field(init=False)
    """Decoded at once; halved when memory runs out."""

    def __post_init__(self) -> None:
        wanted = self.tile_batch or AUTO_TILE_BATCH.get(self.device.type, 1)
        # one by one on the CPU: products of another batch size round differently there, and are no faster
        self.tiles = 1 if self.device.type == "cpu" else wanted

    @property
    def may_shrink(self) -> bool:
        """Only tile_batch 0 gives way when memory runs out; a number that the caller named stands."""
        return self.tile_batch == 0 and self.tiles > 1

    def shrink(self) -> None:
        self.tiles //= 2
        torch.cuda.empty_cache()
        log.warning("video VAE: out of memory, going on with %d tile(s) a call", self.tiles)

    def advance(self, tiles: int) -> None:
        self.done += tiles
        self.on_chunk(self.done, self.total)
