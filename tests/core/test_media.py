"""Mirrors fasth3_core/media/: what a player would see and hear of the files written here."""

from fractions import Fraction

import av
import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import FastH3Error, GeometryError
from comfyui_fasth3.fasth3_core.media import images, mux
from comfyui_fasth3.fasth3_core.media.preview import MAX_SIDE, latent_preview
from comfyui_fasth3.fasth3_core.media.probe import probe_audio
from PIL import Image

RATE = 32000


def ramp(frames, height=64, width=96):
    """A horizontal grey ramp that brightens from frame to frame, so frames can be told apart."""
    columns = torch.linspace(0, 0.5, width).expand(height, width)
    return torch.stack([columns + 0.5 * i / frames for i in range(frames)])[..., None].expand(-1, -1, -1, 3)


def tone(seconds, channels=2, frequency=440.0):
    t = torch.arange(round(seconds * RATE)) / RATE
    return 0.5 * torch.sin(2 * torch.pi * frequency * t).expand(channels, -1)


def decode(path):
    with av.open(str(path)) as container:
        metadata = dict(container.metadata)
        video = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        info = dict(
            codec=video.codec_context.name, pix_fmt=video.codec_context.pix_fmt, rate=video.average_rate,
            colors=(video.codec_context.color_primaries, video.codec_context.color_trc,
                    video.codec_context.colorspace, video.codec_context.color_range),
        )
    with av.open(str(path)) as container:
        sound = [frame for frame in container.decode(audio=0)] if container.streams.audio else []
        stream = container.streams.audio[0] if sound else None
        seconds = stream.duration * stream.time_base if sound else None
        wave = torch.cat([torch.from_numpy(f.to_ndarray()) for f in sound], dim=-1) if sound else None
        codec = stream.codec_context.name if sound else None
    return frames, info, metadata, codec, seconds, wave


@pytest.mark.parametrize("frames", [5, 22, 39])
@pytest.mark.parametrize("heard", [0.1, 10.0], ids=["short-sound", "long-sound"])
def test_mp4_has_every_frame_and_sound_of_the_same_length(tmp_path, frames, heard):
    path = tmp_path / "a.mp4"
    assert mux.write_mp4(path, [ramp(frames)], audio=tone(heard)) == frames
    seen, info, _, codec, seconds, wave = decode(path)
    assert len(seen) == frames
    assert info == {"codec": "h264", "pix_fmt": "yuv420p", "rate": Fraction(24), "colors": (1, 1, 1, 1)}
    assert codec == "aac"
    assert seconds == Fraction(round(frames * RATE / 24), RATE)
    assert wave.shape[0] == 2
    assert wave.shape[1] >= round(frames * RATE / 24)


def test_pixels_survive_the_colour_matrix(tmp_path):
    patches = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.2, 0.5, 0.8]])
    picture = patches.repeat_interleave(32, dim=0).expand(64, -1, 3)
    mux.write_mp4(tmp_path / "a.mp4", [picture.expand(5, -1, -1, 3)], crf=1)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frame = next(container.decode(video=0))
        planes = frame.to_ndarray()
    luma = planes[:64, 16::32][:, :4].mean(axis=0)
    # BT.709 luma in studio range; BT.601 would give red 82 and green 145
    expected = [16 + 219 * (0.2126 * r + 0.7152 * g + 0.0722 * b) for r, g, b in patches.tolist()]
    torch.testing.assert_close(torch.tensor(luma).float(), torch.tensor(expected), rtol=0, atol=2)


def test_chunks_are_taken_one_at_a_time_and_give_the_same_file(tmp_path):
    whole = ramp(22)
    mux.write_mp4(tmp_path / "whole.mp4", [whole], audio=tone(1))
    taken = []

    def chunks():
        for start in range(0, 22, 5):
            taken.append(start)
            yield whole[start:start + 5]

    mux.write_mp4(tmp_path / "parts.mp4", chunks(), audio=tone(1))
    assert taken == [0, 5, 10, 15, 20]
    assert [f.tobytes() for f in decode(tmp_path / "parts.mp4")[0]] == [
        f.tobytes() for f in decode(tmp_path / "whole.mp4")[0]
    ]


def test_sound_stays_with_its_frame(tmp_path):
    wave = torch.zeros(2, 2 * RATE)
    wave[:, RATE // 2:] = tone(1.5)
    mux.write_mp4(tmp_path / "a.mp4", [ramp(39)], audio=wave)
    heard = decode(tmp_path / "a.mp4")[5]
    start = int((heard[0].abs() > 0.1).nonzero()[0])
    assert abs(start - RATE // 2) <= 1024  # one AAC frame


def test_metadata_and_unicode_name(tmp_path):
    path = tmp_path / "Füchsin 狐.mp4"
    mux.write_mp4(path, [ramp(5)], metadata={"prompt": {"1": {"class_type": "é"}}, "workflow": {"version": 0.4}})
    assert '"class_type"' in decode(path)[2]["prompt"]
    assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat"), "the index must come first"


@pytest.mark.parametrize(
    "chunks, audio, message",
    [
        ([], None, "no frames"),
        ([torch.zeros(5, 33, 32, 3)], None, "even size, got 32x33"),
        ([torch.zeros(5, 32, 32, 3), torch.zeros(5, 32, 64, 3)], None, "frame 5 is 64x32, but the video is 32x32"),
        ([torch.zeros(5, 32, 32)], None, r"must be \[n, height, width, 3\]"),
        ([torch.zeros(5, 32, 32, 3)], torch.zeros(6, 100), r"1 or 2, samples\], got \[6, 100\]"),
    ],
    ids=["none", "odd", "changing", "grey", "six-channels"],
)
def test_bad_input_leaves_nothing_behind(tmp_path, chunks, audio, message):
    with pytest.raises(GeometryError, match=message):
        mux.write_mp4(tmp_path / "a.mp4", chunks, audio=audio)
    assert list(tmp_path.iterdir()) == []


def test_failure_halfway_leaves_nothing_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")

    def chunks():
        yield ramp(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mux.write_mp4(path, chunks(), audio=tone(1))
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]
    assert path.read_bytes() == b"old"


def test_broken_sound_does_not_cost_the_picture(tmp_path):
    mux.write_mp4(tmp_path / "a.mp4", [ramp(5)], audio=torch.full((2, RATE), float("nan")))
    frames, _, _, codec, _, wave = decode(tmp_path / "a.mp4")
    assert len(frames) == 5
    assert codec == "aac"
    assert float(wave.abs().max()) < 1e-3


def test_uint8_rounds_and_clamps():
    values = torch.tensor([-1.0, 0.0, 0.5 / 255, 0.499 / 255, 1.0, 2.0, float("nan")])
    assert mux.to_uint8(values).tolist() == [0, 0, 0, 0, 255, 255, 0]
    assert mux.to_uint8(torch.arange(256) / 255).tolist() == list(range(256))


@pytest.mark.parametrize(
    "wave, warning",
    [
        (0.3 * torch.sin(torch.arange(32000) / 10), None),
        (torch.full((32000,), float("nan")), "64000 samples are not finite"),
        (torch.zeros(32000), "silent"),
        (0.2 + 0.1 * torch.sin(torch.arange(32000) / 10), "0.20 off zero"),
        ((3 * torch.sin(torch.arange(32000) / 10)).clamp(-1, 1), "samples are clipped"),
        (torch.zeros(32000).index_fill(0, torch.tensor([99]), 0.9).index_fill(0, torch.tensor([100]), -0.9), "1.80"),
        (torch.zeros(0), "empty"),
    ],
    ids=["healthy", "nan", "silent", "offset", "clipped", "click", "empty"],
)
def test_audio_probe(wave, warning):
    found = probe_audio(wave.expand(1, 2, -1)).warnings
    assert (not found) if warning is None else any(warning in text for text in found)


def turned_picture(path):
    """Red above blue when upright, stored on its side with the EXIF tag that says so."""
    upright = Image.new("RGB", (40, 80), (0, 0, 255))
    upright.paste((255, 0, 0), (0, 0, 40, 40))
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored.save(path, exif=exif)


def test_load_rgb_turns_upright_and_drops_alpha(tmp_path):
    turned_picture(tmp_path / "a.png")
    image = images.load_rgb(tmp_path / "a.png")
    assert image.size == (40, 80)
    assert image.getpixel((20, 10)) == (255, 0, 0)
    Image.new("RGBA", (4, 4), (1, 2, 3, 0)).save(tmp_path / "b.png")
    assert images.to_tensor(images.load_rgb(tmp_path / "b.png")).shape == (4, 4, 3)


def test_load_rgb_refuses_what_is_no_picture(tmp_path):
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(FastH3Error, match="cannot be read as a picture"):
        images.load_rgb(tmp_path / "a.png")


@pytest.mark.parametrize("size", [(100, 40), (40, 100), (64, 32), (7, 5)], ids="{0[0]}x{0[1]}".format)
def test_fit_to_canvas(size):
    image = Image.new("RGB", size, (10, 20, 30))
    for fit in (images.stretch, images.cover_crop):
        assert fit(image, 32, 64).size == (64, 32)


def test_cover_crop_keeps_the_centre_and_the_aspect():
    image = Image.new("RGB", (300, 100), (0, 0, 0))
    image.paste((255, 255, 255), (100, 0, 200, 100))  # the centre third
    cropped = images.to_tensor(images.cover_crop(image, 100, 100))
    assert cropped[50, 10:90].min() > 0.99
    stretched = images.to_tensor(images.stretch(image, 100, 100))
    assert stretched[50, 10].max() < 0.01


def test_picture_round_trip():
    pixels = torch.rand(8, 9, 3).mul(255).round() / 255
    torch.testing.assert_close(images.to_tensor(images.to_image(pixels)), pixels, rtol=0, atol=1e-6)


@pytest.mark.parametrize("h, w", [(4, 4), (48, 84), (126, 32)])
def test_preview_is_small_and_takes_the_aspect(h, w):
    picture = latent_preview(torch.randn(1, 24, 7, h, w))
    assert max(picture.size) <= MAX_SIDE
    assert picture.width / picture.height == pytest.approx(w / h, rel=0.02)


def test_preview_follows_the_brightness_channel():
    dark, bright = torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 24, 2, 4, 4)
    bright[:, 9], dark[:, 9] = 1.0, -1.0
    assert images.to_tensor(latent_preview(bright)).mean() > images.to_tensor(latent_preview(dark)).mean() + 0.4
