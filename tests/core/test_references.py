"""Mirrors fasth3_core/media/references.py: limits, sizes, and which frame is shown when."""

import pytest
from comfyui_fasth3.fasth3_core.errors import ConfigError, GeometryError
from comfyui_fasth3.fasth3_core.media.references import (
    Timed,
    at_24_fps,
    check_counts,
    check_frames,
    encoded_frames,
    picture_size,
    video_size,
)

CANVAS = (768, 1344)


def counts(pictures, videos, sounds):
    return {"picture": pictures, "video": videos, "sound": sounds}


def constant(frames, rate):
    return [Timed(i / rate, (i + 1) / rate, i) for i in range(frames)]


@pytest.mark.parametrize("given", [(9, 3, 0), (9, 0, 3), (6, 3, 3), (0, 1, 3), (0, 0, 0)])
def test_what_the_model_takes(given):
    assert check_counts(counts(*given)) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((10, 0, 0), "10 picture references: the model takes at most 9"),
        ((0, 4, 0), "4 video references: .* at most 3"),
        ((1, 0, 4), "4 sound references: .* at most 3"),
        ((9, 3, 1), "13 references: .* at most 12 in all"),
        ((0, 0, 2), "sound is the only reference"),
    ],
)
def test_what_it_does_not(given, message):
    with pytest.raises(GeometryError, match=message):
        check_counts(counts(*given))


@pytest.mark.parametrize(
    ("size", "rule", "expected"),
    [
        ((768, 1344), "trained", (2048, 3584)), ((512, 512), "trained", (2048, 2048)),
        ((4096, 2160), "trained", (3872, 2048)), ((100, 400), "trained", (2048, 8192)),
        ((512, 520), "not enlarged", (512, 512)), ((4096, 2160), "not enlarged", (3872, 2048)),
        ((512, 520), "as the video", (512, 512)), ((4096, 4096), "as the video", (1024, 1024)),
        ((20, 20), "as the video", (32, 32)),
    ],
)
def test_size_of_a_picture(size, rule, expected):
    assert picture_size(*size, rule, CANVAS) == expected


@pytest.mark.parametrize(
    ("size", "rule", "expected"),
    [
        ((1080, 1920), "trained", (768, 1344)), ((90, 90), "trained", (768, 768)),
        ((1080, 1920), "not enlarged", (768, 1344)), ((90, 90), "as the video", (96, 96)),
    ],
)
def test_size_of_a_video(size, rule, expected):
    assert video_size(*size, rule) == expected


@pytest.mark.parametrize("size", [(100, 401), (401, 100), (0, 5)])
def test_an_aspect_past_four_to_one_is_refused(size):
    for what, refused in (("picture", lambda: picture_size(*size, "trained", CANVAS)),
                          ("video", lambda: video_size(*size, "trained"))):
        with pytest.raises(GeometryError, match=rf"{what} of {size[1]} x {size[0]} pixels: its aspect is outside 1:4"):
            refused()


def test_another_rule():
    with pytest.raises(ConfigError, match="'trained', 'not enlarged', 'as the video'"):
        picture_size(64, 64, "large", CANVAS)


def test_a_constant_rate_of_30_loses_every_fifth_frame():
    shown = list(at_24_fps(constant(30, 30), 362))
    assert len(shown) == 24 and sorted(set(range(30)) - set(shown)) == [2, 7, 12, 17, 22, 27]


def test_a_slow_source_repeats_and_a_long_one_is_cut():
    assert list(at_24_fps(constant(3, 12), 362)) == [0, 0, 1, 1, 2, 2]
    assert list(at_24_fps(constant(3, 12), 3)) == [0, 0, 1]
    assert list(at_24_fps(constant(300, 24), 124)) == list(range(124))


@pytest.mark.parametrize("rate", [1, 8, 12, 23.976, 24, 25, 29.97, 30, 50, 59.94, 60, 120])
def test_every_rate_as_the_slots_say(rate):
    """Frame i fills the slots from floor(i * 24 / rate + 0.5) to that of i + 1."""
    slots = [int(i * 24 / rate + 0.5) for i in range(int(4 * rate) + 1)]
    expected = [i for i in range(len(slots) - 1) for _ in range(slots[i + 1] - slots[i])]
    assert list(at_24_fps(constant(len(slots) - 1, rate), 1000)) == expected


def test_frames_show_where_their_own_times_are():
    """A variable rate that starts late: a still of half a second between two quick frames."""
    times = [7.0, 7 + 1 / 24, 7 + 13 / 24]
    timed = [Timed(a, b, i) for i, (a, b) in enumerate(zip(times, [*times[1:], 7 + 14 / 24], strict=True))]
    assert list(at_24_fps(timed, 362)) == [0, *[1] * 12, 2]


def test_no_further_than_needed():
    source = iter(constant(1000, 24))
    assert len(list(at_24_fps(source, 10))) == 10
    assert next(source).item == 11


def test_what_does_not_come_later_is_not_shown():
    timed = [Timed(0, 1 / 24, "a"), Timed(0, 1 / 24, "b"), Timed(-1, 0, "c"), Timed(1 / 24, 2 / 24, "d")]
    assert list(at_24_fps(timed, 10)) == ["a", "d"]
    assert list(at_24_fps([], 10)) == []


def test_encoded_lengths():
    lengths = {5: 5, 21: 21, 22: 22, 23: 22, 39: 39, 120: 107, 362: 362}
    assert {n: encoded_frames(n) for n in lengths} == lengths
    check_frames(5)
    with pytest.raises(GeometryError, match="4 frames at 24 a second: the model needs at least 5"):
        check_frames(4)
