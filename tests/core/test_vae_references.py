"""Mirrors fasth3_core/vae/reference_media.py."""

import pytest
from comfyui_fasth3.fasth3_core.errors import GeometryError
from comfyui_fasth3.fasth3_core.vae.reference_media import (
    check_counts,
    constant_times,
    encoded_frames,
    picture_size,
    resample,
    video_size,
)


@pytest.mark.parametrize("counts", [(9, 3, 0), (9, 0, 3), (6, 3, 3), (0, 1, 3), (0, 0, 0)])
def test_what_the_model_takes(counts):
    check_counts(*counts)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((10, 0, 0), "10 reference images: the model takes at most 9"),
        ((0, 4, 0), "4 reference videos: .* at most 3"),
        ((1, 0, 4), "4 reference audios: .* at most 3"),
        ((9, 3, 1), "13 references: .* at most 12 in all"),
        ((0, 0, 2), "sound is the only reference"),
    ],
)
def test_what_it_does_not(counts, message):
    with pytest.raises(GeometryError, match=message):
        check_counts(*counts)


@pytest.mark.parametrize(
    ("size", "expected"), [((768, 1344), (2048, 3584)), ((512, 512), (2048, 2048)), ((4096, 2160), (3872, 2048))]
)
def test_a_picture_gets_a_short_side_of_2048(size, expected):
    assert picture_size(*size) == expected


def test_an_aspect_past_four_to_one_is_refused():
    assert picture_size(100, 400) == (2048, 8192)
    with pytest.raises(GeometryError, match=r"401 x 100 pixels: its aspect is outside 1:4 to 4:1"):
        picture_size(100, 401)


def test_a_video_gets_the_canvas_of_its_own_aspect():
    assert video_size(1080, 1920) == (768, 1344) and video_size(720, 720) == (768, 768)


def test_a_constant_rate_of_30_loses_every_fifth_frame():
    shown = resample(*constant_times(30, 30), 362)
    assert len(shown) == 24 and sorted(set(range(30)) - set(shown)) == [2, 7, 12, 17, 22, 27]


def test_a_slow_source_repeats_and_a_long_one_is_cut():
    assert resample(*constant_times(3, 12), 362) == [0, 0, 1, 1, 2, 2]
    assert resample(*constant_times(300, 24), 124) == list(range(124))


def test_frames_show_where_their_own_times_are():
    """A variable rate: a still of half a second between two quick frames."""
    shown = resample([0.0, 1 / 24, 13 / 24], 14 / 24, 362)
    assert shown == [0, *[1] * 12, 2]


@pytest.mark.parametrize(
    ("times", "end"), [([], 1.0), ([0.0, 0.5, 0.5], 1.0), ([0.0, 1.0], 1.0), ([0.0], float("inf")), ([0.0], 0.01)]
)
def test_times_that_show_nothing(times, end):
    with pytest.raises(GeometryError, match=r"times do not ascend|shorter than half a frame"):
        resample(times, end, 10)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_rate_that_is_none(rate):
    with pytest.raises(GeometryError, match="expected a positive number"):
        constant_times(3, rate)


def test_encoded_lengths():
    lengths = {1: 22, 5: 22, 21: 22, 22: 22, 23: 22, 39: 39, 120: 107, 362: 362}
    assert {n: encoded_frames(n) for n in lengths} == lengths
