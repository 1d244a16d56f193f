"""Mirrors fasth3_core/media/formats.py and mux.py: what a player sees and hears of a file of every format."""

import json
import shutil
import subprocess
from fractions import Fraction

import av
import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ConfigError, FastH3Error
from comfyui_fasth3.fasth3_core.media import delivery, formats, sound
from comfyui_fasth3.fasth3_core.media.pixels import quantise
from PIL import Image

from .movies import RATE, decode, ramp, tone, write


def test_pixels_survive_the_colour_matrix(tmp_path):
    patches = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.2, 0.5, 0.8]])
    picture = patches.repeat_interleave(32, dim=0).expand(64, -1, 3)
    write(tmp_path / "a.mp4", [picture.expand(5, -1, -1, 3)], output=formats.output("mp4 h264", crf=1))
    with av.open(str(tmp_path / "a.mp4")) as container:
        frame = next(container.decode(video=0))
        planes = frame.to_ndarray()
    luma = planes[:64, 16::32][:, :4].mean(axis=0)
    # BT.709 luma in studio range; BT.601 would give red 82 and green 145
    expected = [16 + 219 * (0.2126 * r + 0.7152 * g + 0.0722 * b) for r, g, b in patches.tolist()]
    torch.testing.assert_close(torch.tensor(luma).float(), torch.tensor(expected), rtol=0, atol=2)


EVERY = [
    ("mp4 h264", 8, "h264", "yuv420p", "avc1"), ("mp4 h264", 10, "h264", "yuv420p10le", "avc1"),
    ("mp4 h265", 8, "hevc", "yuv420p", "hvc1"), ("mp4 h265", 10, "hevc", "yuv420p10le", "hvc1"),
    ("mp4 av1", 8, "av1", "yuv420p", "av01"), ("mp4 av1", 10, "av1", "yuv420p10le", "av01"),
    ("mkv lossless", 8, "ffv1", "bgr0", None), ("mkv lossless", 10, "ffv1", "gbrp10le", None),
]  # fmt: skip


def test_every_format_and_depth_is_tested_here():
    there = [(f.name, depth) for f in formats.FORMATS.values() for depth in f.pixels if f.muxer]
    assert there == [row[:2] for row in EVERY]


@pytest.mark.parametrize("audio", ["auto", "aac", "flac", "none"])
@pytest.mark.parametrize("name, depth, codec, pixels, tag", EVERY, ids=[f"{row[0]} {row[1]}" for row in EVERY])
def test_every_format(tmp_path, name, depth, codec, pixels, tag, audio):
    output = formats.output(name, depth, 20, audio)
    path, wave = tmp_path / f"a{output.form.suffix}", 0.8 * tone(3)
    write(path, [ramp(17), ramp(5)], audio=wave, output=output, metadata={"workflow": {"version": 0.4}})
    frames, info, metadata, heard_codec, seconds, heard = decode(path, "rgb48le")
    assert len(frames) == 22 and info["rate"] == 24
    assert codec in info["codec"] or info["codec"] == "libdav1d"
    assert info["pix_fmt"] == pixels
    assert info["colors"] == ((1, 1, 0, 2) if output.form.rgb else (1, 1, 1, 1))
    with av.open(str(path)) as container:
        assert tag is None or container.streams.video[0].codec_context.codec_tag == tag
    kept = {key.lower(): value for key, value in metadata.items()}
    assert json.loads(kept["workflow"]) == {"version": 0.4}
    error = (torch.from_numpy(frames[16].astype("int32")) / 65535 - ramp(17)[16]).abs()
    assert error.mean() < (0.003 if output.form.rgb else 0.012)
    samples = round(22 * RATE / 24)
    expected = {"auto": output.form.audio, "none": None}.get(audio, audio)
    assert heard_codec == expected
    if expected == "flac":
        # 24 bits, sample for sample
        whole = torch.as_tensor(heard.reshape(-1, 2).T if heard.shape[0] == 1 else heard)
        assert whole.shape == (2, samples)
        torch.testing.assert_close(whole.double() / 2**31, wave[:, :samples].double(), rtol=0, atol=2**-23)
    if expected is not None and path.suffix == ".mp4":
        assert seconds == Fraction(samples, RATE)
    if path.suffix == ".mp4":
        assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat"), "the index must come first"


def test_lossless_is_lossless(tmp_path):
    noise = torch.rand(5, 34, 50, 3)
    output = formats.output("mkv lossless")
    write(tmp_path / "a.mkv", [noise], output=output)
    with av.open(str(tmp_path / "a.mkv")) as container:
        seen = torch.stack([torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)])
    assert torch.equal(seen, quantise(noise))


def test_pictures(tmp_path):
    noise = torch.rand(22, 34, 50, 3)
    write(tmp_path / "a", [noise[:17], noise[17:]], output=formats.output("png frames"), metadata={"prompt": {"1": 2}})
    files = sorted((tmp_path / "a").iterdir())
    assert [f.name for f in files] == [f"{n:05}.png" for n in range(1, 23)]
    for file, frame in zip(files, quantise(noise), strict=True):
        with Image.open(file) as picture:
            assert json.loads(picture.text["prompt"]) == {"1": 2}
            assert torch.equal(torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view_as(frame), frame)


def test_ten_bits_are_finer_than_eight(tmp_path):
    """A slow ramp: 8 bits make steps of 1/255 out of it."""
    slow = torch.linspace(0.4, 0.42, 96).expand(5, 64, 96)[..., None].expand(-1, -1, -1, 3)
    errors = {}
    for depth in (8, 10):
        write(tmp_path / f"{depth}.mp4", [slow], output=formats.output("mp4 h265", depth, 4))
        frame = decode(tmp_path / f"{depth}.mp4", "rgb48le")[0][2]
        errors[depth] = float((torch.from_numpy(frame.astype("int32")) / 65535 - slow[0]).abs().mean())
    assert errors[10] < 0.5 * errors[8]


BAD = {
    "crf": (("mp4 h264", 8, 52), "0 to 51 for mp4 h264"), "negative": (("mp4 av1", 8, -1), "0 to 63 for mp4 av1"),
    "depth": (("png frames", 10, 18), "8 for png frames"), "name": (("avi", 8, 18), "one of mp4 h264"),
    "audio": (("mp4 h264", 8, 18, "mp3"), "'aac', 'flac'"), "png-aac": (("png frames", 8, 18, "aac"), "WAV"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_settings_that_do_not_go_together(name):
    settings, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        formats.output(*settings)


def test_an_encoder_that_pyav_lacks_is_named_before_anything_is_decoded(tmp_path):
    form = formats.Format("mp4 x", ".mp4", "mp4", "libnothing", {8: "yuv420p"}, "aac", 51)
    with pytest.raises(FastH3Error, match="no encoder libnothing"):
        delivery.try_out(tmp_path, formats.Output(form), 96, 64, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", formats.FORMATS)
def test_try_out_leaves_nothing(tmp_path, name):
    delivery.try_out(tmp_path / "new", formats.output(name), 96, 64, sound.fit(tone(1), RATE, 22))
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(("width", "height"), [(16386, 64), (64, 16386)])
@pytest.mark.parametrize("name", ["mp4 h264", "mp4 av1"])
def test_a_size_that_an_encoder_refuses_is_one_message_before_anything_is_decoded(tmp_path, name, width, height):
    with pytest.raises(FastH3Error, match=rf"{name}: lib\w+ does not take {width}x{height} .* make the picture"):
        delivery.try_out(tmp_path, formats.output(name), width, height, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="needs ffprobe")
@pytest.mark.parametrize("name", [row[0] for row in EVERY[::2]])
def test_ffprobe_agrees(tmp_path, name):
    output = formats.output(name)
    path = tmp_path / f"a{output.form.suffix}"
    write(path, [ramp(22)], audio=tone(1), output=output)
    told = subprocess.run(
        ["ffprobe", "-v", "error", "-count_frames", "-show_streams", "-of", "json", path], stdout=subprocess.PIPE,
        check=True,
    )  # fmt: skip
    video, audio = json.loads(told.stdout)["streams"]
    assert video["nb_read_frames"] == "22" and video["color_primaries"] == "bt709"
    assert audio["codec_name"] == output.audio_codec
