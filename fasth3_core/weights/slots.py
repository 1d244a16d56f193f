"""Streamed blocks: a few slots on the device, filled in turn from host memory while another block computes.

A slot is written by a copy stream and read by the stream that computes. Two events order them, and nothing waits for
the whole device: the reader waits until its slot is full, and a copy waits until the last reader of its slot is done.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .masters import HostBlock, slot_views
from .parts import Weight

_STAGING_BYTES = 64 << 20
"""Two page-locked buffers of this size carry what is not page-locked itself."""

_KEPT_TIMES = 4096
"""Waits that are remembered where nobody asks for them."""


@dataclass
class Traffic:
    """What streaming did since it was last asked."""

    copies: int = 0
    nbytes: int = 0
    wait_seconds: float = 0.0
    """For which computing stood still until its weights had arrived."""


class _Slot:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.block: int | None = None
        self.weights: Mapping[str, Weight] = {}
        self.full = None
        """Event after the copy into it."""
        self.read = None
        """Event after its last use."""
        self.turn = 0


class SlotRing:
    """Gives the streamed blocks to the forward, each for the length of a `with`, and fetches the next ones ahead."""

    def __init__(self, blocks: Mapping[int, HostBlock], device: torch.device, slots: int) -> None:
        self._blocks = dict(sorted(blocks.items()))
        self._order = list(self._blocks)
        self._small = {i: block.small_on(device) for i, block in self._blocks.items()}
        size = max(block.slot_bytes for block in self._blocks.values())
        self._slots = [_Slot(size, device) for _ in range(min(slots, len(self._order)))]
        self._lane = _CudaLane(device) if device.type == "cuda" else _PlainLane()
        self._lock = threading.RLock()
        self._turn = 0
        self._traffic = Traffic()
        for i in self._order[: len(self._slots)]:
            self._fetch(i)

    @contextmanager
    def use(self, index: int) -> Iterator[Mapping[str, Weight]]:
        """One block's weights on the device. They are another's after the `with`; another thread waits for that."""
        with self._lock:
            slot = self._holding(index) or self._fetch(index)
            self._turn += 1
            slot.turn = self._turn
            self._lane.wait_full(slot)
            try:
                yield slot.weights
            finally:
                self._lane.mark_read(slot)
            self._fetch_after(index)

    def _fetch_after(self, index: int) -> None:
        # issued once the block's own work is queued, so that host time spent here is hidden behind it
        at = self._order.index(index)
        ahead = [self._order[(at + n) % len(self._order)] for n in range(1, len(self._slots))]
        for i in ahead:
            if self._holding(i) is None:
                self._fetch(i, keep=ahead)

    def _holding(self, index: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.block == index), None)

    def _fetch(self, index: int, keep: list[int] | None = None) -> _Slot:
        """Start the copy of a block into the slot that was used longest ago."""
        slot = min((s for s in self._slots if s.block is None or s.block not in (keep or ())), key=lambda s: s.turn)
        self._turn += 1
        block = self._blocks[index]
        slot.block = None  # until the copy is on its way: a failure leaves an empty slot, never half of another block
        views = slot_views(block.moved, slot.buffer)
        self._lane.copy(slot, views, block)
        slot.weights = block.over(views, self._small[index])
        slot.block, slot.turn = index, self._turn
        self._traffic.copies += 1
        self._traffic.nbytes += sum(t.nbytes for t in block.moved)
        return slot

    def take_traffic(self) -> Traffic:
        """What was copied and waited for since the last call. Call it when the device is idle."""
        traffic, self._traffic = self._traffic, Traffic()
        traffic.wait_seconds = self._lane.take_wait()
        return traffic

    def close(self) -> None:
        """Wait until no copy reads host memory or writes a slot any more."""
        self._lane.finish()
        self._slots.clear()


class _PlainLane:
    """Devices without streams of their own: every copy is done when it returns."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def copy(self, slot: _Slot, views: tuple[torch.Tensor, ...], block: HostBlock) -> None:
        started = time.perf_counter()
        for view, tensor in zip(views, block.moved, strict=True):
            view.copy_(tensor)
        self._seconds += time.perf_counter() - started

    def wait_full(self, slot: _Slot) -> None:
        """Full since the copy returned."""

    def mark_read(self, slot: _Slot) -> None:
        """Nothing is queued behind the reader's back."""

    def take_wait(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def finish(self) -> None:
        """Nothing is under way."""


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._times: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_KEPT_TIMES)
        self._staging: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        # slots were just allocated: their memory may still be read by work that is queued on the computing stream
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, slot: _Slot, views: tuple[torch.Tensor, ...], block: HostBlock) -> None:
        if slot.read is not None:
            self._stream.wait_event(slot.read)
        with torch.cuda.stream(self._stream):
            for view, tensor in zip(views, block.moved, strict=True):
                if tensor.is_pinned():
                    view.copy_(tensor, non_blocking=True)
                else:
                    self._copy_staged(view, tensor)
        slot.full = self._stream.record_event()

    def _copy_staged(self, view: torch.Tensor, tensor: torch.Tensor) -> None:
        """Piece by piece through page-locked memory: several times as fast as the driver's own way, and the host is
        free while the last pieces travel."""
        source, target = (t.view(-1).view(torch.uint8) for t in (tensor, view))
        for start in range(0, source.numel(), _STAGING_BYTES):
            buffer, sent = self._next_staging()
            piece = source[start : start + _STAGING_BYTES]
            buffer[: piece.numel()].copy_(piece)
            target[start : start + _STAGING_BYTES].copy_(buffer[: piece.numel()], non_blocking=True)
            sent.record(self._stream)

    def _next_staging(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        if not self._staging:
            self._staging = [
                (torch.empty(_STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]
        self._staging.append(self._staging.pop(0))
        self._staging[-1][1].synchronize()
        return self._staging[-1]

    def wait_full(self, slot: _Slot) -> None:
        computing = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(computing)
        computing.wait_event(slot.full)
        after.record(computing)
        self._times.append((before, after))

    def mark_read(self, slot: _Slot) -> None:
        slot.read = torch.cuda.current_stream(self._device).record_event()

    def take_wait(self) -> float:
        seconds = sum(before.elapsed_time(after) for before, after in self._times) / 1e3
        self._times.clear()
        return seconds

    def finish(self) -> None:
        self._stream.synchronize()
