"""What of a model is where: on a device, and in host memory."""

from collections.abc import Collection, Hashable, Mapping

import torch

from ..model.handle import Tables
from .masters import HostBlock, PinnedPool
from .parts import Weight, tensors_of, with_tensors
from .slots import SlotRing


class Placed:
    """What is on the device. Replaced as a whole, so a reader without the lock sees all of it or none."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.top: dict[str, Weight] = {}
        self.text: Mapping[str, Weight] = {}
        self.blocks: dict[int, Mapping[str, Weight]] = {}
        self.ring: SlotRing | None = None
        self.tables: dict[Hashable, Tables] = {}

    def clear(self) -> None:
        if self.ring is not None:
            self.ring.close()
        self.ring = None
        self.top, self.text, self.blocks, self.tables = {}, {}, {}, {}


class Hosts:
    """Copies in host memory of what visits the device, for one dtype and one device that they are page-locked for."""

    def __init__(self) -> None:
        self.text: HostBlock | None = None
        self.blocks: dict[int, HostBlock] = {}
        self.gated: dict[int, bool] = {}
        self._pool: PinnedPool | None = None
        self._for: tuple[torch.device, torch.dtype] | None = None

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Drop what was made for another device or dtype."""
        if self._for != (device, dtype):
            self.drop()
            self._for = (device, dtype)

    def pool_for(self, limit: int, device: torch.device) -> PinnedPool:
        if self._pool is None:
            self._pool = PinnedPool(device)
        self._pool.allow(limit)
        return self._pool

    @property
    def all(self) -> list[HostBlock]:
        return [*self.blocks.values(), *([] if self.text is None else [self.text])]

    def keep_only(self, blocks: Collection[int]) -> None:
        """Let go of those that are on the device for good."""
        for i in self.blocks.keys() - set(blocks):
            del self.blocks[i]
        if not blocks:
            self.text = None

    def drop(self) -> None:
        self.text = None
        self.blocks.clear()
        self.gated.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def to_host(weight: Weight) -> Weight:
    return with_tensors(weight, [t.cpu() for t in tensors_of(weight)])


def to_device(block: HostBlock, device: torch.device) -> dict[str, Weight]:
    """Copies of its own, on a CPU, too."""
    return {
        name: with_tensors(weight, [t.to(device, copy=True) for t in tensors_of(weight)])
        for name, weight in block.weights.items()
    }


def indexed(device: torch.device) -> torch.device:
    """cuda -> cuda:0 (the current one), so that equal places compare equal."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())
