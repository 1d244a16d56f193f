"""Mirrors nodes/saving.py: the MP4 of the preview node, what it carries, and what it refuses."""

import json

import av
import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ConfigError, ContractError, FastH3Error, GeometryError
from comfyui_fasth3.fasth3_core.report.run_report import RunReport
from comfyui_fasth3.nodes import _movie
from comfyui_fasth3.nodes._host import io

IMAGES = torch.rand(5, 64, 96, 3)
AUDIO = {"waveform": 0.1 * torch.randn(1, 2, 8000), "sample_rate": 32000}
REPORT = RunReport(contract={"name": "preview-4", "shift_video": 12.0, "shift_audio": 3.0})
HIDDEN = {io.Hidden.prompt: {"1": {"class_type": "X"}}, io.Hidden.extra_pnginfo: {"workflow": {"nodes": []}}}


def streams(path):
    with av.open(str(path)) as container:
        frames = sum(1 for _ in container.decode(video=0))
        return frames, len(container.streams.audio), dict(container.metadata)


def test_file_and_ui(run, folders):
    ui = run("FastH3SavePreview", images=IMAGES, audio=AUDIO, filename_prefix="video/FastH3").ui
    assert ui["images"] == [{"filename": "FastH3_00001_.mp4", "subfolder": "video", "type": "output"}]
    assert ui["animated"] == (True,)
    assert ui["text"][0].startswith("FastH3_00001_.mp4: 96x64, 5 frames (0.21 s)\nsound peak ")
    assert streams(folders / "output" / "video" / "FastH3_00001_.mp4")[:2] == (5, 1)


def test_without_audio_there_is_no_sound_track(run, folders):
    run("FastH3SavePreview", images=IMAGES, filename_prefix="quiet")
    assert streams(folders / "output" / "quiet_00001_.mp4")[:2] == (5, 0)


def test_numbers_go_up_and_nothing_is_overwritten(run, folders):
    for _ in range(2):
        run("FastH3SavePreview", images=IMAGES, filename_prefix="a")
    run("FastH3SavePreview", images=IMAGES, filename_prefix="ab")
    assert sorted(p.name for p in (folders / "output").iterdir()) == ["a_00001_.mp4", "a_00002_.mp4", "ab_00001_.mp4"]


def test_workflow_and_report_are_stored(run, folders):
    ui = run("FastH3SavePreview", HIDDEN, images=IMAGES, filename_prefix="a", report=REPORT).ui
    metadata = streams(folders / "output" / "a_00001_.mp4")[2]
    assert json.loads(metadata["prompt"]) == HIDDEN[io.Hidden.prompt]
    assert json.loads(metadata["workflow"]) == {"nodes": []}
    assert json.loads(metadata["fasth3_report"]) == REPORT.to_dict()
    assert REPORT.to_text() in ui["text"][0]


def test_no_metadata_where_the_host_forbids_it(run, folders, host, monkeypatch):
    monkeypatch.setattr(host, "wants_metadata", lambda: False)
    run("FastH3SavePreview", HIDDEN, images=IMAGES, filename_prefix="a", report=REPORT)
    assert not {"prompt", "workflow", "fasth3_report"} & set(streams(folders / "output" / "a_00001_.mp4")[2])


def test_alpha_is_dropped_and_mono_is_fine(run, folders):
    run("FastH3SavePreview", images=torch.rand(5, 64, 96, 4), filename_prefix="a",
        audio={"waveform": torch.zeros(1, 1, 100), "sample_rate": 44100})
    assert streams(folders / "output" / "a_00001_.mp4")[:2] == (5, 1)


def test_prefix_with_variables_and_unicode(run, folders):
    run("FastH3SavePreview", images=IMAGES, filename_prefix="狐/%width%x%height%")
    assert (folders / "output" / "狐" / "96x64_00001_.mp4").is_file()


@pytest.mark.parametrize(
    "wave, warning",
    [
        (torch.full((1, 2, 8000), float("nan")), "16000 samples (100.0%) are not finite"),
        (torch.zeros(1, 2, 8000), "silent (RMS 0.0e+00)"),
        (torch.full((1, 2, 8000), 0.3), "channel 0 is constant at 0.300"),
        (torch.zeros(1, 2, 8000).index_fill(2, torch.tensor([4000]), 0.9), "1 click, the largest 0.90 high at 0.12 s"),
    ],
    ids=["nan", "silent", "constant", "click"],
)
def test_bad_sound_is_named_and_kept_raw_and_the_video_is_written(run, folders, wave, warning):
    ui = run("FastH3SavePreview", HIDDEN, images=IMAGES, filename_prefix="a", report=REPORT,
             audio={"waveform": wave, "sample_rate": 32000}).ui
    assert warning in ui["text"][0] and "the raw sound is kept in a_00001_.wav" in ui["text"][0]
    frames, tracks, metadata = streams(folders / "output" / "a_00001_.mp4")
    assert (frames, tracks) == (5, 1)
    assert any(warning in text for text in json.loads(metadata["fasth3_output"])["sound"]["warnings"])
    with av.open(str(folders / "output" / "a_00001_.wav")) as container:
        raw = torch.cat([torch.from_numpy(f.to_ndarray()).view(-1, 2).T for f in container.decode(audio=0)], dim=1)
    torch.testing.assert_close(raw, wave[0], rtol=0, atol=0, equal_nan=True)


def test_sound_that_no_encoder_takes_costs_the_track_alone(run, folders):
    ui = run("FastH3SavePreview", images=IMAGES, filename_prefix="a",
             audio={"waveform": AUDIO["waveform"], "sample_rate": 12345}).ui
    assert "warning: the sound cannot be encoded as aac and is not in the file" in ui["text"][0]
    assert streams(folders / "output" / "a_00001_.mp4")[:2] == (5, 0)
    assert (folders / "output" / "a_00001_.wav").is_file()


def test_raw_sound_that_cannot_be_kept_costs_nothing(run, folders, monkeypatch):
    def full(path, *rest):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_movie, "write_wav", full)
    silent = {"waveform": torch.zeros(1, 2, 6667), "sample_rate": 32000}
    ui = run("FastH3SavePreview", images=IMAGES, filename_prefix="a", audio=silent).ui
    assert "warning: a_00001_.wav could not be written" in ui["text"][0]
    assert [p.name for p in (folders / "output").iterdir()] == ["a_00001_.mp4"]


def test_sound_of_no_samples_is_named(run, folders):
    empty = {"waveform": torch.zeros(1, 2, 0), "sample_rate": 32000}
    text = run("FastH3SavePreview", images=IMAGES, filename_prefix="a", audio=empty).ui["text"][0]
    assert "the sound track is empty" in text and "kept" not in text


BAD = {
    "one-picture": (dict(images=IMAGES[0]), GeometryError, r"\[64, 96, 3\]"),
    "masks": (dict(images=torch.rand(5, 64, 96)), GeometryError, r"\[5, 64, 96\]"),
    "odd": (dict(images=torch.rand(5, 63, 96, 3)), GeometryError, "even size, got 96x63"),
    "two-clips": (dict(audio={"waveform": torch.zeros(2, 2, 9), "sample_rate": 32000}), ContractError, "one clip"),
    "no-rate": (dict(audio={"waveform": torch.zeros(1, 2, 9), "sample_rate": 0}), ContractError, "0 samples a second"),
    "no-height": (dict(images=torch.rand(5, 0, 96, 3)), GeometryError, r"\[5, 0, 96, 3\]"),
    "split-character": (dict(filename_prefix="\ud800"), ConfigError, "whole characters"),
    "long-path": (dict(filename_prefix="/".join(["x" * 100] * 60)), ConfigError, "at most 4000 bytes"),
    "surround": (dict(audio={"waveform": torch.zeros(1, 6, 9), "sample_rate": 32000}), GeometryError, "1 or 2"),
    "outside": (dict(filename_prefix="../a"), ConfigError, "inside the output folder"),
    "absolute": (dict(filename_prefix="/tmp/a"), ConfigError, "inside the output folder"),
    "no-name": (dict(filename_prefix=""), ConfigError, "inside the output folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_writes_nothing(run, folders, name):
    change, error, message = BAD[name]
    with pytest.raises(error, match=message):
        run("FastH3SavePreview", **{"images": IMAGES, "filename_prefix": "a", **change})
    assert [p for p in folders.rglob("*.mp4")] == []
    assert [p for p in folders.rglob("*.part")] == []


def test_interrupt_leaves_nothing(run, folders, host, monkeypatch):
    class Stop(BaseException):
        pass

    calls = []

    def interrupt():
        calls.append(1)
        if len(calls) == 2:
            raise Stop

    monkeypatch.setattr(host, "check_interrupt", interrupt)
    with pytest.raises(Stop):
        run("FastH3SavePreview", images=torch.rand(22, 64, 96, 3), filename_prefix="a")
    assert list((folders / "output").iterdir()) == []


def test_frames_wider_than_the_encoder_takes(run, folders):
    with pytest.raises(FastH3Error, match=r"mp4 h264: libx264 does not take 16386x16 .* make the picture smaller"):
        run("FastH3SavePreview", images=torch.zeros(1, 16, 16386, 3), filename_prefix="wide")
    assert not any((folders / "output").iterdir())
