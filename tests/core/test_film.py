"""Mirrors fasth3_core/media/film.py: frames at their own times, upright, in their colours; the sound in its place."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ConfigError, FastH3Error
from comfyui_fasth3.fasth3_core.media.film import FramesFilm, open_film
from comfyui_fasth3.fasth3_core.media.images import to_tensor
from comfyui_fasth3.fasth3_core.media.references import at_24_fps

HEIGHT, WIDTH = 48, 64
RATE = 44100


def shade(i):
    return 10 + 12 * i


def write_film(target, times, sound_from=None, name="film.mkv", patch=lambda data: data):
    """Grey frames, each its own shade and with a red top left corner, at the given times in milliseconds."""
    buffer = io.BytesIO()
    buffer.name = name
    with av.open(buffer, "w", format=name.split(".")[-1].replace("mkv", "matroska")) as container:
        video = container.add_stream("libx264", rate=1000, options={"crf": "0", "bf": "0"})
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv444p"
        video.codec_context.time_base = Fraction(1, 1000)
        audio = container.add_stream("pcm_s16le", rate=RATE, layout="stereo") if sound_from is not None else None
        for i, time in enumerate(times):
            pixels = np.full((HEIGHT, WIDTH, 3), shade(i), dtype=np.uint8)
            pixels[:16, :16] = (200, 0, 0)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None:
            ramp = torch.arange(RATE, dtype=torch.int16).expand(2, -1).T.reshape(1, -1).contiguous()
            frame = av.AudioFrame.from_ndarray(ramp.numpy(), format="s16", layout="stereo")
            frame.sample_rate, frame.pts = RATE, round(sound_from * RATE)
            frame.time_base = Fraction(1, RATE)
            container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    target.write_bytes(patch(buffer.getvalue()))
    return target


def shades(film, most=1000):
    """Shade number of every frame at 24 a second."""
    pictures = [to_tensor(make()) for make in at_24_fps(film.frames(), most)]
    return [round((float(p[-8:, -8:].mean()) * 255 - 10) / 12) for p in pictures]


def test_frames_of_a_variable_rate(tmp_path):
    film = open_film(write_film(tmp_path / "a.mkv", [0, 42, 542, 584]))
    assert (film.height, film.width) == (HEIGHT, WIDTH)
    assert shades(film) == [0, *[1] * 12, 2]  # the last one is declared to last a millisecond


def test_sixty_a_second(tmp_path):
    film = open_film(write_film(tmp_path / "a.mkv", [round(i * 1000 / 60) for i in range(10)]))
    assert shades(film) == [1, 3, 6, 8][: len(shades(film))]


def test_frames_that_nobody_sees_are_not_made(tmp_path, monkeypatch):
    made = []
    from comfyui_fasth3.fasth3_core.media import film as module

    upright = module._upright
    monkeypatch.setattr(module, "_upright", lambda frame: made.append(frame.pts) or upright(frame))
    film = open_film(write_film(tmp_path / "a.mkv", range(0, 100, 5)))
    assert len(shades(film, most=2)) == len(made) == 2


def test_colours(tmp_path):
    picture = to_tensor(next(open_film(write_film(tmp_path / "a.mkv", [0])).frames()).item())
    assert (picture[4, 4] * 255 - torch.tensor([200.0, 0, 0])).abs().max() < 6


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_part_of_a_film(tmp_path, in_memory):
    path = write_film(tmp_path / "a.mkv", [0, 250, 500, 750], sound_from=0)
    source = io.BytesIO(path.read_bytes()) if in_memory else path
    film = open_film(source, 0.25, 0.5)
    assert sorted(set(shades(film))) == [1, 2]
    wave, rate = film.sound(10)
    assert rate == RATE and wave.shape == (1, 2, RATE // 2)
    assert wave[0, 0, 100] * 32768 == pytest.approx(RATE // 4 + 100, abs=1)


@pytest.mark.parametrize("late", [0.0, 0.25])
def test_sound_keeps_its_place(tmp_path, late):
    film = open_film(write_film(tmp_path / "a.mkv", [0, 500], sound_from=late))
    wave, _ = film.sound(0.5)
    silence = round(late * RATE)
    assert wave.shape == (1, 2, RATE // 2) and not wave[..., : max(0, silence - 50)].any()
    assert wave[0, 1, silence + 1000] * 32768 == pytest.approx(1000, abs=50)
    assert open_film(write_film(tmp_path / "b.mkv", [0])).sound(1) is None


def turned(*matrix):
    """Patches the matrix of the track header."""

    def patch(data):
        a, b, c, d = (value << 16 for value in matrix)
        at = data.index(b"tkhd") + 4 + 40  # version 0
        return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]

    return patch


@pytest.mark.parametrize(
    ("matrix", "shown"),
    [((0, 1, -1, 0), (4, -4)), ((0, -1, 1, 0), (-4, 4)), ((-1, 0, 0, -1), (-4, -4)), ((1, 0, 0, 1), (4, 4))],
    ids=["right", "left", "half", "none"],
)
def test_upright(tmp_path, matrix, shown):
    """A phone's film: the corner that is stored top left is shown where its turn brings it."""
    film = open_film(write_film(tmp_path / "a.mp4", [0], name="a.mp4", patch=turned(*matrix)))
    picture = to_tensor(next(film.frames()).item())
    assert (film.height, film.width) == picture.shape[:2] == ((WIDTH, HEIGHT) if matrix[1] else (HEIGHT, WIDTH))
    assert picture[shown][0] > 0.7 and picture[shown][1] < 0.1
    others = [(y, x) for y in (4, -4) for x in (4, -4) if (y, x) != shown]
    assert all(picture[y, x, 1] > 0.02 for y, x in others)


def test_a_span_that_ends_within_a_frame(tmp_path):
    path = write_film(tmp_path / "a.mkv", [0, 500, 1000])
    assert shades(open_film(path, 0.0, 0.75)) == [0] * 12 + [1] * 6


def test_frames_of_a_graph():
    frames = torch.linspace(0, 1, 6)[:, None, None, None].expand(6, 8, 16, 4)
    film = FramesFilm(frames, 12, (torch.randn(1, 2, 100), 50))
    assert (film.height, film.width) == (8, 16)
    shown = [float(to_tensor(make()).mean()) for make in at_24_fps(film.frames(), 100)]
    assert shown == pytest.approx([round(i / 5 * 255) / 255 for i in range(6) for _ in range(2)])
    assert film.sound(0.5)[0].shape[2] == 25 and FramesFilm(frames, 12).sound(1) is None


@pytest.mark.parametrize(("frames", "rate"), [(torch.zeros(0, 8, 8, 3), 24), (torch.zeros(2, 8, 8, 1), 24),
                                              (torch.zeros(2, 8, 8, 3), 0)])
def test_frames_that_are_no_film(frames, rate):
    with pytest.raises(ConfigError, match=r"images=|frame_rate="):
        FramesFilm(frames, rate)


def test_frames_that_are_no_numbers():
    frames = torch.zeros(3, 8, 8, 3)
    frames[1, 2, 3] = float("nan")
    first, second, _ = FramesFilm(frames, 24).frames()
    first.item()
    with pytest.raises(FastH3Error, match="frame 1 of a reference video has NaN"):
        second.item()


def test_tags_in_another_alphabet(tmp_path):
    film = open_film(write_film(tmp_path / "a.mkv", [0, 500], patch=lambda data: data.replace(b"Lavf", b"L\xe4vf")))
    assert film.height == HEIGHT


def test_files_that_are_no_film(tmp_path):
    path = write_film(tmp_path / "a.mkv", [0, 500])
    (tmp_path / "cut.mkv").write_bytes(path.read_bytes()[:200])
    (tmp_path / "text.mp4").write_text("no film")
    for name in ("cut.mkv", "text.mp4", "absent.mp4"):
        with pytest.raises(FastH3Error, match=rf"{name} (cannot be read as a video|has no)"):
            open_film(tmp_path / name)
    with pytest.raises(FastH3Error, match=r"a.mkv has no frame from 9 s on"):
        open_film(path, 9)
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(FastH3Error, match=r"sound\.wav has no video"):
        open_film(tmp_path / "sound.wav")
