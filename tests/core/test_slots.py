"""The slots through which streamed blocks pass: filled ahead, never while they are read, by no two threads at once."""

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from comfyui_fasth3.fasth3_core.weights import slots
from comfyui_fasth3.fasth3_core.weights.masters import HostBlock
from comfyui_fasth3.fasth3_core.weights.slots import SlotRing


class RecordingLane:
    """A device whose copies land only when their reader waits for them, as late as the events allow."""

    def __init__(self):
        self.log, self.pending = [], {}

    def copy(self, slot, views, block):
        assert slot not in self.pending, "a copy into a slot whose last copy nobody has waited for"
        self.log.append(("copy", block.weights["n"][0, 0].item(), id(slot)))
        slot.buffer.fill_(255)  # whatever was in it is lost from now on
        self.pending[slot] = (views, block)

    def wait_full(self, slot):
        if slot in self.pending:
            views, block = self.pending.pop(slot)
            for view, tensor in zip(views, block.moved, strict=True):
                view.copy_(tensor)
        self.log.append(("wait", slot.block, id(slot)))

    def mark_read(self, slot):
        self.log.append(("read", slot.block, id(slot)))

    def take_wait(self):
        return 0.0

    def finish(self):
        self.log.append(("finish",))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_slots_are_filled_ahead_and_never_while_they_are_read(monkeypatch, count):
    lane = RecordingLane()
    monkeypatch.setattr(slots, "_PlainLane", lambda: lane)
    order = (0, 1, 3, 4, 6)
    ring = SlotRing({i: HostBlock({"n": torch.full((32, 8), float(i))}) for i in order}, torch.device("cpu"), count)
    assert [entry[1] for entry in lane.log] == list(order[:count]), "filled when it is made"
    for _ in range(3):
        for i in order:
            with ring.use(i) as weights:
                before = len(lane.log)
                assert (weights["n"] == i).all()
                assert len(lane.log) == before, "nothing is copied while a block is being queued"
    copies = [entry[1] for entry in lane.log if entry[0] == "copy"]
    ahead = [order[n % 5] for n in range(len(copies))]
    assert copies == ahead, "in the order of use, each once a round"
    waits = [n for n, entry in enumerate(lane.log) if entry[0] == "wait"]
    for n, at in enumerate(waits[:-1]):
        done = [entry[1] for entry in lane.log[: waits[n + 1]] if entry[0] == "copy"]
        assert lane.log[waits[n + 1]][1] in done[-count:], "the next block was on its way before it was needed"
        assert lane.log[at + 1][0] == "read"
    ring.close()
    assert lane.log[-1] == ("finish",)


def test_two_threads_do_not_write_over_what_the_other_reads():
    ring = SlotRing({i: HostBlock({"n": torch.full((32, 8), float(i))}) for i in range(5)}, torch.device("cpu"), 2)

    def read_all():
        for i in range(5):
            with ring.use(i) as weights:
                assert (weights["n"] == i).all()

    with ThreadPoolExecutor(1) as other:
        with ring.use(0) as weights:
            reading = other.submit(read_all)
            wait([reading], timeout=0.2)
            assert (weights["n"] == 0).all()
        reading.result(timeout=60)
