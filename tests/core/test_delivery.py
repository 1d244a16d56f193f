"""Mirrors fasth3_core/media/delivery.py, behind.py, pixels.py and sound.py: files that are whole or not there."""

import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import av
import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import GeometryError
from comfyui_fasth3.fasth3_core.media import delivery, formats, mux, sound
from comfyui_fasth3.fasth3_core.media.behind import behind
from comfyui_fasth3.fasth3_core.media.pixels import quantise

from .movies import H264, RATE, decode, ramp, tone, write


@pytest.mark.parametrize("frames", [5, 22, 39])
@pytest.mark.parametrize("heard", [0.1, 10.0], ids=["short-sound", "long-sound"])
def test_mp4_has_every_frame_and_sound_of_the_same_length(tmp_path, frames, heard):
    path = tmp_path / "a.mp4"
    write(path, [ramp(frames)], audio=tone(heard))
    seen, info, _, codec, seconds, wave = decode(path)
    assert len(seen) == frames
    assert info == {"codec": "h264", "pix_fmt": "yuv420p", "rate": Fraction(24), "colors": (1, 1, 1, 1)}
    assert codec == "aac"
    assert seconds == Fraction(round(frames * RATE / 24), RATE)
    assert wave.shape[0] == 2
    assert wave.shape[1] >= round(frames * RATE / 24)


def test_chunks_give_the_same_file_as_the_whole(tmp_path):
    whole = ramp(22)
    write(tmp_path / "whole.mp4", [whole], audio=tone(1))
    write(tmp_path / "parts.mp4", list(whole.split(5)), audio=tone(1))
    assert [f.tobytes() for f in decode(tmp_path / "parts.mp4")[0]] == [
        f.tobytes() for f in decode(tmp_path / "whole.mp4")[0]
    ]


def test_sound_stays_with_its_frame(tmp_path):
    wave = torch.zeros(2, 2 * RATE)
    wave[:, RATE // 2:] = tone(1.5)
    write(tmp_path / "a.mp4", [ramp(39)], audio=wave)
    heard = decode(tmp_path / "a.mp4")[5]
    start = int((heard[0].abs() > 0.1).nonzero()[0])
    assert abs(start - RATE // 2) <= 1024  # one AAC frame


def test_metadata_and_unicode_name(tmp_path):
    path = tmp_path / "Füchsin 狐.mp4"
    write(path, [ramp(5)], metadata={"prompt": {"1": {"class_type": "é"}}, "workflow": {"version": 0.4}})
    assert '"class_type"' in decode(path)[2]["prompt"]


@pytest.mark.parametrize(
    "chunks, audio, message",
    [
        ([], None, "no frames"),
        ([torch.zeros(5, 33, 32, 3)], None, "even size, got 32x33"),
        ([torch.zeros(5, 32, 32, 3), torch.zeros(5, 32, 64, 3)], None, r"5, 32, 64, 3\] at frame 5, expected \[n, 32"),
        ([torch.zeros(5, 32, 32)], None, r"expected \[n, 32, 32, 3\]"),
        ([torch.zeros(5, 32, 32, 3)], torch.zeros(6, 100), r"1 or 2, samples\], got \[6, 100\]"),
    ],
    ids=["none", "odd", "changing", "grey", "six-channels"],
)
def test_bad_input_leaves_nothing_behind(tmp_path, chunks, audio, message):
    with pytest.raises(GeometryError, match=message):
        write(tmp_path / "a.mp4", chunks, audio=audio)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", formats.FORMATS)
@pytest.mark.parametrize("at", range(4))
def test_failure_at_each_chunk_leaves_nothing_and_keeps_the_old_file(tmp_path, name, at):
    output = formats.output(name)
    path = tmp_path / f"a{output.form.suffix}"
    if output.form.muxer:
        path.write_bytes(b"old")

    def chunks():
        for number in range(4):
            if number == at:
                raise KeyboardInterrupt
            yield ramp(5)

    with pytest.raises(KeyboardInterrupt):
        write(path, chunks(), audio=tone(1), output=output, frames=20)
    assert [p.name for p in tmp_path.iterdir()] == (["a" + path.suffix] if output.form.muxer else [])
    assert not output.form.muxer or path.read_bytes() == b"old"


@pytest.mark.parametrize("at", range(3))
def test_an_encoder_that_fails_stops_the_decoding(tmp_path, monkeypatch, at):
    """As a full disk does: what write() raises in its thread arrives at a later put(), or at the end."""
    real, taken = mux.Movie.write, []

    def fail(movie, frames):
        taken.append(len(frames))
        if len(taken) == at + 1:
            raise OSError(28, "No space left on device")
        real(movie, frames)

    monkeypatch.setattr(mux.Movie, "write", fail)
    given = []

    def chunks():
        for number in range(30):
            given.append(number)
            yield ramp(5)

    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a.mp4", chunks(), frames=150)
    assert len(given) <= at + 5 and len(taken) == at + 1
    assert list(tmp_path.iterdir()) == []


def test_encoding_overlaps_decoding_and_what_waits_is_bounded(tmp_path):
    """The encoder is held at its first chunk: two more are taken, and not a fourth until it goes on."""
    hold, given = threading.Event(), []

    def chunks():
        for number in range(6):
            given.append(number)
            yield ramp(5)

    thread = threading.Thread(
        target=write, args=(tmp_path / "a.mp4", chunks()),
        kwargs=dict(frames=30, on_written=lambda frames: hold.wait(20)),
    )  # fmt: skip
    thread.start()
    deadline = time.monotonic() + 10
    while len(given) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert given == [0, 1, 2]
    hold.set()
    thread.join(20)
    assert given == list(range(6)) and len(decode(tmp_path / "a.mp4")[0]) == 30


CHILD = """
import importlib.util, sys, time
from pathlib import Path
root = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location(
    "comfyui_fasth3", root / "__init__.py", submodule_search_locations=[str(root)])
sys.modules["comfyui_fasth3"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["comfyui_fasth3"])
import torch
from comfyui_fasth3.fasth3_core.media import delivery, formats
with delivery.delivering(Path(sys.argv[2]), formats.Output(), 96, 64) as put:
    for number in range(int(sys.argv[3])):
        put(torch.rand(17, 64, 96, 3))
    print("there", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_no_half_file_and_the_next_save_sweeps(tmp_path):
    path = tmp_path / "a.mp4"
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen([sys.executable, "-c", CHILD, root, path, "8"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline().strip() == "there"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not path.exists()
    left = list(tmp_path.iterdir())
    assert [p.name for p in left] == [f".a.mp4.{child.pid}.part"], "hidden, and under no name that anything opens"
    write(path, [ramp(5)])
    assert left[0].exists(), "it might be another process's that is still at work"
    long_ago = time.time() - delivery.ABANDONED_SECONDS - 1
    (tmp_path / ".download.part").write_text("of another program")
    for old in (left[0], tmp_path / ".download.part"):
        os.utime(old, (long_ago, long_ago))
    write(path, [ramp(5)])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".download.part", "a.mp4"]


def test_a_temporary_file_that_has_gone_meanwhile(tmp_path):
    (tmp_path / ".b.mp4.1.part").symlink_to(tmp_path / "gone")
    write(tmp_path / "a.mp4", [ramp(5)])
    assert len(decode(tmp_path / "a.mp4")[0]) == 5


def test_pictures_after_a_killed_process_of_the_same_number(tmp_path):
    left = tmp_path / f".a.{os.getpid()}.part"
    left.mkdir()
    (left / "00009.png").write_text("half")
    write(tmp_path / "a", [ramp(5)], output=formats.output("png frames"))
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [f"{n:05}.png" for n in range(1, 6)]


def test_a_file_that_cannot_be_closed_hides_no_interruption(tmp_path):
    with pytest.raises(KeyboardInterrupt), mux.Movie(tmp_path / "a", H264, 96, 64) as movie:
        movie.container = None
        raise KeyboardInterrupt


def test_what_broke_stays_broken():
    """Or a decoder that goes on after its memory ran out would deliver a video with holes."""

    def work(item):
        raise MemoryError(item)

    with pytest.raises(MemoryError), behind(work) as put:
        put(0)
        for later in range(1, 9):
            with pytest.raises(MemoryError, match="0"):
                put(later)
                put(later)
                put(later)


def test_broken_sound_does_not_cost_the_picture(tmp_path):
    write(tmp_path / "a.mp4", [ramp(5)], audio=torch.full((2, RATE), float("nan")))
    frames, _, _, codec, _, wave = decode(tmp_path / "a.mp4")
    assert len(frames) == 5
    assert codec == "aac"
    assert float(wave.abs().max()) < 1e-3


def test_sound_that_is_too_loud_is_clamped():
    """FLAC takes whole numbers, in which 1.5 would come round to -0.5."""
    kept = sound.fit(torch.tensor([[1.5, -2.0, 0.5]]), RATE, 5).wave_CL
    assert kept[0, :3].tolist() == [1.0, -1.0, 0.5] and not kept[0, 3:].any()


def test_wav_keeps_every_bit(tmp_path):
    wave = torch.tensor([[0.1, float("nan"), 3.0, float("inf")], [-0.2, 0.0, -7.5, float("-inf")]]).repeat(1, 9000)
    sound.write_wav(tmp_path / "a.wav", wave, RATE)
    with av.open(str(tmp_path / "a.wav")) as container:
        raw = torch.cat([torch.from_numpy(f.to_ndarray()).view(-1, 2).T for f in container.decode(audio=0)], dim=1)
    torch.testing.assert_close(raw, wave, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 16])
def test_quantise_rounds_and_clamps(bits):
    top = 2**bits - 1
    values = torch.tensor([-1.0, 0.0, 0.5 / top, 0.499 / top, 1.0, 2.0, float("nan"), float("inf"), 0.25])
    whole = quantise(values.expand(1, 1, 3, -1).transpose(2, 3), bits)[0, 0, :, 0]
    assert whole.tolist() == [0, 0, 0, 0, top, top, 0, top, round(0.25 * top)]
