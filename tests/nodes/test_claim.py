"""Mirrors nodes/_claim.py: a number in the output folder belongs to one process at a time."""

import os
import time

import pytest
from comfyui_fasth3.fasth3_core.media.delivery import ABANDONED_SECONDS, sweep
from comfyui_fasth3.nodes import _claim


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", [".mp4", ""])
def test_two_at_once_have_two_numbers(host, folders, suffix):
    """Whatever they write: a folder, a film, the sound beside it."""
    with _claim.output_file("a", ".mp4") as first, _claim.output_file("a", suffix) as second:
        assert (first.filename, second.filename) == ("a_00001_.mp4", f"a_00002_{suffix}")
        assert second.path == folders / "output" / second.filename
        second.path.touch()
        first.path.touch()
    assert names(folders / "output") == sorted(["a_00001_.mp4", f"a_00002_{suffix}"])
    with _claim.output_file("a", ".mp4") as third:
        assert third.filename == "a_00003_.mp4"


def test_a_number_that_was_taken_since_the_host_looked(host, folders, monkeypatch):
    seen = host.output_file("a", ".mp4")
    (folders / "output" / "a_00001_.wav").touch()
    monkeypatch.setattr(host, "output_file", lambda *_: seen)
    with _claim.output_file("a", ".mp4") as file:
        assert file.filename == "a_00002_.mp4"


def test_nothing_is_left_of_a_failure(host, folders):
    with pytest.raises(RuntimeError), _claim.output_file("a", ".mp4"):
        raise RuntimeError
    assert names(folders / "output") == []


def test_what_a_killed_process_held_is_free_a_day_later(host, folders):
    with _claim.output_file("a", ".mp4"):
        (held,) = (folders / "output").iterdir()
        old = time.time() - ABANDONED_SECONDS - 1
        os.utime(held, (old, old))
        sweep(folders / "output")
        assert names(folders / "output") == []
