"""Mirrors nodes/_canvas.py and FastH3 Empty Latent: only legal sizes come out, and it says what it changed."""

import pytest
from comfyui_fasth3.fasth3_core.packing.geometry import check_frames, check_size
from comfyui_fasth3.nodes import _latents
from comfyui_fasth3.nodes._canvas import ASPECTS, choose_canvas
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(aspect=st.sampled_from(list(ASPECTS)), megapixels=st.floats(0.1, 4.0))
def test_canvas_is_legal_and_near_the_request(aspect, megapixels):
    width, height = choose_canvas(aspect, megapixels, 0, 0)
    check_size(width, height)
    across, down = ASPECTS[aspect]
    assert width / height == pytest.approx(across / down, rel=0.25)
    # the side of a small canvas moves in large steps; from 0.4 megapixels on the area is met
    assert width * height == pytest.approx(megapixels * 1e6, rel=0.04 if megapixels >= 0.4 else 0.08)


@settings(deadline=None)
@given(width=st.integers(1, 4096), height=st.integers(1, 4096))
def test_custom_size_goes_to_the_nearest(width, height):
    canvas = choose_canvas("custom", 0.0, width, height)
    check_size(*canvas)
    assert all(abs(side - asked) <= 31 for side, asked in zip(canvas, (width, height), strict=True))


@pytest.mark.parametrize("aspect, size", [
    ("16:9", (1344, 768)), ("9:16", (768, 1344)), ("1:1", (768, 768)), ("4:3", (1024, 768)), ("21:9", (1536, 672)),
])  # fmt: skip
def test_own_canvas_of_the_model(aspect, size):
    assert choose_canvas(aspect, 0.0, 1, 1) == size


@pytest.mark.parametrize("seconds, frames", [(0.1, 5), (0.9, 22), (5, 124), (5.17, 141), (10, 243), (15, 362)])
def test_length(run, seconds, frames):
    latent, counted = run("FastH3EmptyLatent", width=64, height=96, seconds=seconds).args
    check_frames(counted)
    assert counted == frames
    video, audio = _latents.split(latent)
    assert tuple(video.shape) == (1, 24, (frames - 5) // 17 * 5 + 2, 6, 4)
    assert audio.shape[3] == round(frames / 24 * 40)
    assert not video.any() and not audio.any()


def text(run, **inputs):
    return run("FastH3EmptyLatent", **{"width": 1344, "height": 768, "seconds": 5.0, **inputs}).ui["text"][0]


def test_says_what_it_did(run, caplog):
    with caplog.at_level("INFO", logger="fasth3"):
        assert text(run) == "1344x768, 5 s -> 124 frames (5.17 s)"
        assert text(run, width=1280, height=720) == "1280x720 -> 1280x704, 5 s -> 124 frames (5.17 s)"
        assert text(run, aspect="1:1", megapixels=0.4) == "640x640, 5 s -> 124 frames (5.17 s)"
        assert "trained on 124 to 362 frames" in text(run, seconds=1.0)
    assert "1280x720 -> 1280x704" in caplog.text
