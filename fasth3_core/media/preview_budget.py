"""Previews never take more than a set share of the time of a run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SHARE = 0.02


@dataclass
class PreviewBudget:
    """Counts from its making. A preview is due when what previews have cost, and another one as dear as the dearest so
    far, stays within the share of the time passed. The first one is taken for `guess` seconds."""

    clock: Callable[[], float] = time.perf_counter
    guess: float = 0.01
    spent: float = 0.0
    dearest: float = 0.0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def due(self) -> bool:
        return self.spent + (self.dearest or self.guess) <= SHARE * (self.clock() - self.started)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of its block, whatever its end."""
        begun = self.clock()
        try:
            yield
        finally:
            cost = self.clock() - begun
            self.spent, self.dearest = self.spent + cost, max(self.dearest, cost)
