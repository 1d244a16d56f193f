"""Mirrors fasth3_core/packing/: sizes, positions and rows against recorded truth and tables."""

import json
from itertools import pairwise

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ContractError, GeometryError
from comfyui_fasth3.fasth3_core.model.dit import step_rows
from comfyui_fasth3.fasth3_core.packing import geometry
from comfyui_fasth3.fasth3_core.packing.layout import Keyframe, Reference, build_layout
from comfyui_fasth3.fasth3_core.packing.rows import pack_audio, patchify, unpack_audio, unpatchify
from safetensors import safe_open

TEXT = torch.ones(5, dtype=torch.int64)


@pytest.mark.parametrize("name", ["dit_dense", "dit_keyframes", "dit_bf16", "dit_vsa", "dit_vsa_tile256"])
def test_positions_and_tags_equal_the_recorded_ones(golden_dir, name):
    with safe_open(golden_dir / f"{name}.safetensors", "pt") as file:
        meta = {key: json.loads(value) for key, value in file.metadata().items()}
        video, audio = file.get_tensor("video"), file.get_tensor("audio")
        positions, tags = file.get_tensor("position_ids"), file.get_tensor("token_tags")
    T = video.shape[2]
    at = {"first": 0, "last": geometry.frames_of_latents(T) - 1}
    keyframes = [Keyframe(at[which], video[:, :, :1]) for which in meta["keyframes"]]
    layout = build_layout(torch.tensor(meta["text_tags"]), T, *video.shape[3:], audio.shape[-1], keyframes)
    assert torch.equal(layout.position_ids, positions)
    assert torch.equal(layout.token_tags, tags)
    assert sum(layout.prefix) + layout.grid[0] * layout.grid[1] * layout.grid[2] == layout.num_tokens


# frames, latent frames, audio latents per channel
@pytest.mark.parametrize(
    ("frames", "T", "A"),
    [(5, 2, 8), (22, 7, 37), (124, 37, 207), (141, 42, 235), (192, 57, 320), (243, 72, 405), (345, 102, 575),
     (362, 107, 603)],
)
def test_frames_latents_and_audio(frames, T, A):
    assert geometry.latent_frames(frames) == T
    assert geometry.frames_of_latents(T) == frames
    assert geometry.audio_latents(frames) == A


@pytest.mark.parametrize(
    ("seconds", "frames"), [(0.0, 5), (0.21, 22), (5, 124), (5.1, 124), (10, 243), (14.4, 362), (15, 362), (15.1, 379)]
)
def test_seconds_snap_up(seconds, frames):
    assert geometry.snap_frames(seconds) == frames


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_no_length_at_all(seconds):
    with pytest.raises(GeometryError, match=f"seconds={seconds}: expected 0 or more"):
        geometry.snap_frames(seconds)


@pytest.mark.parametrize(
    ("aspect", "canvas"),
    [((16, 9), (768, 1344)), ((9, 16), (1344, 768)), ((1, 1), (768, 768)), ((4, 3), (768, 1024)),
     ((3, 2), (768, 1152)), ((21, 9), (672, 1536)), ((4, 1), (512, 2016)), ((1, 4), (2016, 512))],
)
def test_canvas(aspect, canvas):
    assert geometry.resolve_canvas(*aspect) == canvas


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: geometry.check_frames(120), "120 frames: the model takes 17k . 5. Nearest: 107 or 124"),
        (lambda: geometry.check_frames(3), "Nearest: 5 or 22"),
        (lambda: geometry.check_size(1280, 720), "height 720: must be a multiple of 32 pixels. Nearest: 704 or 736"),
        (lambda: geometry.check_size(16, 64), "width 16.*Nearest: 32 or 64"),
        (lambda: geometry.frames_of_latents(36), "36 latent frames.*Nearest: 32 or 37"),
        (lambda: geometry.resolve_canvas(5, 1), "outside 1:4 to 4:1"),
        (lambda: build_layout(torch.tensor([1, 2]), 2, 4, 4, 8), r"1 \(text\) or 0 .*got \[2\]"),
        (lambda: build_layout(TEXT, 2, 4, 4, 8, [Keyframe(5, torch.zeros(1, 24, 1, 4, 4))]), "frames 0 to 4"),
        (lambda: build_layout(TEXT, 2, 4, 4, 8, [Keyframe(0, torch.zeros(1, 24, 1, 4, 6))]),
         "96 x 64 pixels for a video of 64 x 64"),
        (lambda: build_layout(TEXT, 2, 4, 4, 8, [Keyframe(3, torch.zeros(1, 24, 2, 4, 4))]), "not fit in 5 frames"),
        (lambda: Reference("picture"), "reference kind 'picture'"),
        (lambda: Reference("image"), "lacks a picture latent"),
        (lambda: Reference("video", torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 8)), "has a sound latent"),
    ],
)
def test_refusals_name_the_numbers(call, message):
    with pytest.raises((GeometryError, ContractError), match=message):
        call()


def test_area_normalised_grid():
    layout = build_layout(TEXT, 2, 48, 84, 8)
    h, w = layout.position_ids[layout.video.start, 1:].tolist()
    assert h == pytest.approx(3.90513686, abs=1e-8)
    assert w == pytest.approx(-5.16601049, abs=1e-8)


def test_last_keyframe_sits_at_the_last_frame():
    latent = torch.zeros(1, 24, 1, 4, 4)
    layout = build_layout(TEXT, 37, 4, 4, 207, [Keyframe(0, latent), Keyframe(123, latent)])
    first, last = (layout.position_ids[s.start, 0].item() for s in layout.conditions)
    assert (first, last) == (5.0, pytest.approx(5 + 205.0))


def test_reference_clock_moves_the_target():
    image = Reference("image", torch.zeros(1, 24, 1, 4, 6))
    sound = Reference("audio", audio_latent=torch.zeros(1, 32, 2, 8))
    clip = Reference("video_audio", torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 9))
    layout = build_layout(TEXT, 2, 4, 4, 8, references=[image, sound, clip])
    assert layout.position_ids[layout.video.start, 0].item() == 5 + 1 + 8 + 9  # the clip's sound outlasts its picture
    assert [s.clock for s in layout.conditions] == ["condition", "clean", "clean", "condition"]
    assert layout.prefix == (5, 6 + 2 * 4, 2 * (8 + 9 + 8))


def test_references_say_how_many_rows_they_take():
    """As many as the layout gives them, behind 3 of text and before 2 x 8 of sound and the video."""
    references = [
        Reference("image", torch.zeros(1, 24, 1, 4, 6)), Reference("audio", audio_latent=torch.zeros(1, 32, 2, 8)),
        Reference("video_audio", torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 9)),
    ]
    assert [reference.num_tokens for reference in references] == [6, 16, 26]
    tags = torch.ones(3, dtype=torch.int64)
    layouts = [build_layout(tags, 2, 4, 6, 8, references=references[:n]).num_tokens for n in range(4)]
    assert [b - a for a, b in pairwise(layouts)] == [6, 16, 26]


def test_text_runs_follow_the_tags():
    layout = build_layout(torch.tensor([1, 0, 0, 1]), 2, 4, 4, 8)
    assert [(s.start, s.stop, s.tag) for s in layout.segments[:3]] == [(0, 1, 1), (1, 3, 0), (3, 4, 1)]


def test_rows_round_trip_and_are_channel_major():
    latent = torch.arange(1 * 3 * 2 * 4 * 6, dtype=torch.float32).reshape(1, 3, 2, 4, 6)
    rows = patchify(latent)
    assert torch.equal(rows[1], latent[0, :, 0, 0:2, 2:4].reshape(-1))
    assert torch.equal(unpatchify(rows, 2, 4, 6), latent)
    audio = torch.randn(1, 32, 2, 7)
    assert torch.equal(pack_audio(audio)[7], audio[0, :, 1, 0])
    assert torch.equal(unpack_audio(pack_audio(audio)), audio)


@pytest.mark.parametrize(("video_time", "expected"), [(0.2, 0.999), (0.9995, 0.9995)])
def test_conditions_are_never_noisier_than_the_video(video_time, expected):
    """And every row of a step has the time of its kind: text and video, pictures, sound of references, audio."""
    picture, sound = torch.zeros(1, 24, 1, 4, 4), torch.zeros(1, 32, 2, 3)
    references = [Reference("image", picture), Reference("audio", None, sound)]
    layout = build_layout(torch.tensor([1, 0]), 2, 4, 4, 8, (), references)
    step = step_rows(layout, video_time, 0.1, 0.999)
    found = [(round(step.times[row // 3].item(), 6), row % 3) for _, _, row in step.segments]
    assert found == [(video_time, 1), (video_time, 0), (expected, 0), (1.0, 2), (0.1, 2), (video_time, 0)]
    assert [(start, stop) for start, stop, _ in step.segments] == [(s.start, s.stop) for s in layout.segments]
    assert round(step.times[step.audio_row].item(), 6) == 0.1
    assert round(step.times[step.video_row].item(), 6) == video_time
