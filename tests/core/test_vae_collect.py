"""Mirrors fasth3_core/vae/collect.py: chunks end up in order, and a failed copy is not lost in its thread."""

import threading

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import GeometryError
from comfyui_fasth3.fasth3_core.vae.collect import collect, page_locked, planes, through, write_behind

CPU = torch.device("cpu")


def parts(*lengths):
    return [torch.rand(1, 3, length, 4, 6) for length in lengths]


def test_chunks_are_written_in_order():
    chunks = parts(17, 17, 5)
    out = collect(iter(chunks), torch.empty(1, 3, 39, 4, 6), CPU)
    assert torch.equal(out, torch.cat(chunks, dim=2))


@pytest.mark.parametrize("frames", [38, 40])
def test_another_number_of_frames_is_refused(frames):
    with pytest.raises((GeometryError, RuntimeError)):
        collect(parts(17, 17, 5), torch.empty(1, 3, frames, 4, 6), CPU)


def test_missing_frames_are_named():
    with pytest.raises(GeometryError, match="39 frames were decoded, expected 40"):
        collect(parts(17, 17, 5), torch.empty(1, 3, 40, 4, 6), CPU)


@pytest.mark.parametrize("inference", [False, True])
def test_write_behind_copies_every_chunk_in_another_thread(inference):
    threads, marks = set(), iter("abc")

    with torch.inference_mode(inference):
        chunks, out, seen = parts(17, 17, 5), torch.empty(1, 3, 39, 4, 6), []

        def copy(chunk, mark, start):
            threads.add(threading.current_thread().name)
            seen.append((mark, start))
            with torch.inference_mode(inference):  # the mode is per thread, and such a buffer is written in it alone
                for source, target in planes(chunk, out, start):
                    target.copy_(source)

        assert write_behind(iter(chunks), lambda: next(marks), copy) == 39
        assert torch.equal(out, torch.cat(chunks, dim=2))
    assert seen == [("a", 0), ("b", 17), ("c", 34)]
    assert len(threads) == 1 and threads != {threading.current_thread().name}


def test_a_chunk_is_copied_while_the_next_is_made():
    copied = threading.Event()

    def chunks():
        yield torch.rand(1, 3, 2, 4, 6)
        assert copied.wait(10)  # the copy of the first chunk ends before the second exists
        yield torch.rand(1, 3, 2, 4, 6)

    assert write_behind(chunks(), lambda: None, lambda *_: copied.set()) == 4


class Transfer:
    """A copy into a stage that is over no sooner than somebody waits for it."""

    def __init__(self, stage, source):
        self.stage, self.source = stage, source
        stage.fill_(float("nan"))

    def synchronize(self):
        self.stage.copy_(self.source)


@pytest.mark.parametrize("size", [1, 7, 24, 1000])
def test_chunks_go_through_small_stages(size):
    chunk, out = torch.rand(1, 3, 2, 3, 4), torch.full((1, 3, 5, 3, 4), float("nan"))
    through((torch.empty(size), torch.empty(size)), planes(chunk, out, 1), Transfer)
    assert torch.equal(out[:, :, 1:3], chunk)
    assert bool(out[:, :, :1].isnan().all()) and bool(out[:, :, 3:].isnan().all())


def test_ordinary_buffers_where_nothing_can_be_page_locked(monkeypatch, caplog):
    real = torch.empty

    def empty(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    stages = page_locked(torch.float32)
    assert len(stages) == 2 and not any(stage.is_pinned() for stage in stages)
    assert "no page-locked memory, frames are copied more slowly: CUDA error: out of memory" in caplog.text
    assert "more of it" not in caplog.text


def test_something_runs_before_the_first_copy():
    order = []
    write_behind(iter(parts(1)), lambda: None, lambda *_: order.append("copy"), lambda: order.append("first"))
    assert order == ["first", "copy"]


def test_a_failed_copy_is_raised():
    def copy(chunk, mark, start):
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_behind(iter(parts(1, 1)), lambda: None, copy)


def test_a_failed_decode_ends_the_thread():
    def chunks():
        yield torch.rand(1, 3, 2, 4, 6)
        raise KeyError

    before = threading.active_count()
    with pytest.raises(KeyError):
        write_behind(chunks(), lambda: None, lambda *_: None)
    assert threading.active_count() == before
