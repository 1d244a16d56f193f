"""AdaLN tables of the last schedules: made block by block from weights that are read for it and dropped."""

from collections.abc import Callable, Hashable, Mapping

import torch

from ..model.handle import BuildTable, Tables
from .parts import Weight
from .places import Placed

_KEPT = 2
"""Schedules whose tables are kept: 0.1 GB each for four steps at the released size."""


class KeptTables:
    """In host memory, so that they outlive the weights on the device; the last used are on the device, too."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, Tables] = {}

    def get(
        self,
        key: Hashable,
        build: BuildTable,
        placed: Placed,
        num_layers: int,
        adaln: Callable[[int], Mapping[str, Weight]],
    ) -> Tables:
        """Those of a schedule on the device of `placed`.

        Args:
            adaln: block -> its AdaLN weights there.
        """
        if key not in placed.tables:
            kept = (placed.device, placed.dtype, key)
            if kept not in self._tables:
                built = tuple(build(adaln(i)) for i in range(num_layers))
                while len(self._tables) >= _KEPT:
                    del self._tables[next(iter(self._tables))]
                self._tables[kept] = _moved(built, torch.device("cpu"))
                del built
                if placed.device.type == "cuda":
                    # else the run's tensors settle in the room of AdaLN weights and keep torch from giving it up
                    torch.cuda.empty_cache()
            placed.tables.clear()
            placed.tables[key] = _moved(self._tables[kept], placed.device)
        return placed.tables[key]


def _moved(tables: Tables, device: torch.device) -> Tables:
    return tuple(tuple(t.to(device) for t in block) for block in tables)
