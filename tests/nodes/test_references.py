"""Mirrors nodes/references.py: pictures, videos and sounds become references, in order and within limits."""

import io
from fractions import Fraction
from types import SimpleNamespace

import av
import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, ContractError, FastH3Error, GeometryError
from comfyui_fasth3.fasth3_core.media import references as limits
from comfyui_fasth3.fasth3_core.vae import AudioVAE, VideoVAE
from comfyui_fasth3.nodes import _conditioning

HEIGHT, WIDTH = 64, 96


class FramesVideo:
    """A VIDEO of ComfyUI's that holds frames: Create Video's."""

    def __init__(self, images, rate, audio=None):
        self.parts = SimpleNamespace(images=images, frame_rate=Fraction(rate), audio=audio)

    def get_components(self):
        return self.parts


class FileVideo:
    """A VIDEO of ComfyUI's that is a file: Load Video's, or one that was trimmed."""

    def __init__(self, source, window=(0.0, 0.0)):
        self.source, self.window = source, window

    def get_stream_source(self):
        return self.source

    def get_active_trim_window(self):
        return self.window

    def get_components(self):
        raise AssertionError("all frames of a file at once take gigabytes")


def picture(height=HEIGHT, width=WIDTH, channels=3, batch=1):
    return torch.rand(batch, height, width, channels).mul(255).round() / 255


def sound(seconds=0.25, rate=32000):
    return {"waveform": torch.rand(1, 2, int(seconds * rate)) - 0.5, "sample_rate": rate}


def video(frames=24, rate=24, audio=None):
    return FramesVideo(picture(batch=frames), rate, audio)


def slots(name, *values):
    return {f"{name}_{i}": value for i, value in enumerate(values)}


@pytest.fixture
def refer(run, whole_vae, canvas, positive):
    """refer(images=[...], ...) -> the references of the new conditioning."""
    def refer(images=(), videos=(), audios=(), **options):
        inputs = {"positive": positive, "vae": whole_vae, "latent": canvas, "size": "as the video", **options}
        given = {"images": slots("image", *images), "videos": slots("video", *videos),
                 "audios": slots("audio", *audios)}
        output = run("FastH3References", **inputs, **given)
        refer.text = output.ui["text"][0]
        refer.positive = output.args[0]
        return _conditioning.read(output.args[0]).references

    return refer


def as_clip(frames_FHWC):
    return frames_FHWC.permute(3, 0, 1, 2)[None]


def test_everything_in_order(refer, positive, vae_weights, whole_vae):
    first, second, clip, tone = picture(), picture(), video(audio=sound(0.5)), sound()
    found = refer(images=[first, second], videos=[clip, video()], audios=[tone])
    assert [r.kind for r in found] == ["image", "image", "video_audio", "video", "audio"]
    pixels, waves = VideoVAE.from_tensors(vae_weights.video), AudioVAE.from_tensors(vae_weights.audio)
    expected = [pixels.condition_latent(as_clip(image)) for image in (first, second, clip.parts.images[:22])]
    for reference, latent in zip(found, expected, strict=False):
        torch.testing.assert_close(reference.latent, latent, rtol=0, atol=1e-5)
    assert found[2].latent.shape == (1, 24, 7, HEIGHT // 16, WIDTH // 16)
    for reference, audio in ((found[2], clip.parts.audio), (found[4], tone)):
        mean = waves.encode(audio["waveform"].transpose(0, 1))
        expected = waves.normalise(mean).transpose(0, 1)[None]
        torch.testing.assert_close(reference.audio_latent, expected, rtol=0, atol=1e-5)
    assert found[4].audio_latent.shape == (1, 32, 2, 10)
    assert _conditioning.REFERENCES not in positive[0][1], "the given conditioning stays as it is"
    assert whole_vae.location is None, "no decoder of pictures was loaded"
    assert len(refer.text.splitlines()) == 5 and "sound of 0.2 s: 20 tokens" in refer.text


def test_the_mean_is_what_comfyui_takes(refer, vae_weights):
    image = picture()
    (found,) = refer(images=[image], posterior="mean")
    vae = VideoVAE.from_tensors(vae_weights.video)
    torch.testing.assert_close(found.latent, vae.normalise(vae.encode(as_clip(image))), rtol=0, atol=1e-5)


def test_they_add_up(run, refer, positive, whole_vae, canvas):
    """To those of another node, in order; with keyframes; and one entry has what ComfyUI's packing reads."""
    refer(videos=[video(audio=sound())])
    found = refer(positive=refer.positive, audios=[sound()])
    assert [r.kind for r in found] == ["video_audio", "audio"]
    first, second = refer.positive[0][1][_conditioning.REFERENCES]
    assert {key: first[key] for key in ("kind", "latent_t", "latent_h", "latent_w", "ref_audio_t")} == {
        "kind": "video_audio", "latent_t": 7, "latent_h": 4, "latent_w": 6, "ref_audio_t": 10}
    assert set(second) == {"kind", "ref_audio_t", "audio_latent"}
    inputs = {"vae": whole_vae, "latent": canvas, "first_frame": picture()}
    both = _conditioning.read(run("FastH3Keyframes", positive=refer.positive, **inputs).args[0])
    assert len(both.references) == 2 and len(both.keyframes) == 1


def test_every_picture_of_a_batch(refer):
    assert [r.latent.shape[-2:] for r in refer(images=[picture(batch=2), picture(96, 64)])] == [(4, 6), (4, 6), (6, 4)]


def test_sizes(refer, monkeypatch):
    monkeypatch.setattr(limits, "SHORT_EDGE", 96)
    image = picture(64, 128)
    sizes = {rule: tuple(refer(images=[image], size=rule)[0].latent.shape[-2:]) for rule in limits.SIZES}
    assert sizes == {"trained": (6, 12), "not enlarged": (4, 8), "as the video": (4, 6)}


@pytest.mark.parametrize(("alpha", "same_as"), [("drop", None), ("white", 1.0), ("black", 0.0)])
def test_alpha(refer, alpha, same_as):
    rgba = torch.cat([picture(), torch.zeros(1, HEIGHT, WIDTH, 1)], dim=-1)
    plain = rgba[..., :3] if same_as is None else torch.full((1, HEIGHT, WIDTH, 3), same_as)
    actual, expected = (refer(images=[image], alpha=alpha)[0].latent for image in (rgba, plain))
    assert torch.equal(actual, expected)


def test_another_rate_shows_the_frames_of_its_times(refer):
    """48 frames a second: every second one, as the 24 that they are."""
    fast, slow = picture(batch=48), video(frames=1)
    slow.parts.images = fast[::2]
    actual, expected = refer(videos=[FramesVideo(fast, 48)]), refer(videos=[slow])
    assert torch.equal(actual[0].latent, expected[0].latent)


def test_sound_of_a_video_can_be_left_out(refer):
    assert refer(videos=[video(audio=sound())], video_sound="drop")[0].kind == "video"


def write_film(path, frames, rate, shade, name="matroska"):
    with av.open(str(path), "w", format=name) as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "bgr0"
        for i in range(frames):
            pixels = torch.full((HEIGHT, WIDTH, 3), shade(i), dtype=torch.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")))
        container.mux(stream.encode(None))


def test_a_file_is_read_as_a_stream(refer, tmp_path):
    """30 frames a second, from the second second on; the same frames in a graph give the same latent."""
    write_film(tmp_path / "a.mkv", 90, 30, lambda i: 2 * i)
    window = (1.0, 1.0)
    (found,) = refer(videos=[FileVideo(str(tmp_path / "a.mkv"), window)])
    shades = torch.arange(30, 60, dtype=torch.float32)[:, None, None, None] * 2 / 255
    (expected,) = refer(videos=[FramesVideo(shades.expand(30, HEIGHT, WIDTH, 3), 30)])
    assert found.kind == "video" and torch.equal(found.latent, expected.latent)
    (in_memory,) = refer(videos=[FileVideo(io.BytesIO((tmp_path / "a.mkv").read_bytes()), window)])
    assert torch.equal(in_memory.latent, found.latent)


def test_the_sampler_takes_them(run, model, refer, canvas):
    """And they matter: another picture gives another video."""
    videos = []
    for image in (picture(), picture()):
        refer(images=[image])
        output = run("FastH3Sampler", model=model, positive=refer.positive, latent=canvas, seed=1)
        videos.append(output.args[0]["samples"].unbind()[0])
        assert "references" in output.args[1].to_text()
    assert not torch.equal(*videos)


def test_nothing_connected_passes_the_prompt_on(refer, positive):
    assert refer() == () and refer.positive is positive
    assert refer(images=[None]) == () and refer.positive is positive


def test_the_text_encoder_sees_what_is_encoded(refer, text_encoder):
    """Prepared pictures, two frames a second of videos with their times, and where sound is."""
    clip, image, film = text_encoder(), picture(), video(frames=22, audio=sound())
    found = refer(positive=None, clip=clip, prompt="<Picture 1> runs", images=[image], videos=[film], audios=[sound()])
    assert [r.kind for r in found] == ["image", "video_audio", "audio"]
    assert clip.text == "<Picture 1> runs"
    assert [item["type"] for item in clip.beside] == ["image", "audio", "video", "audio"]
    assert torch.equal(clip.beside[0]["data"], image) and clip.beside[2]["timestamps"] == [0.0, 0.5]
    assert torch.equal(clip.beside[2]["data"], film.parts.images[[0, 12]])
    assert _conditioning.read(refer.positive).token_tags.tolist() == [0, 1, 0, 1, 1, 1]


def test_a_prompt_without_references(refer, text_encoder):
    assert refer(positive=None, clip=text_encoder(), prompt="a fox") == ()


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"positive": None}, ConfigError, "positive, clip='neither'"),
        ({"clip": {}}, ConfigError, "positive, clip='both'"),
        ({"prompt": "a fox"}, ConfigError, "prompt='a fox': expected no text without clip"),
        ({"positive": None, "clip": {"tags": False}}, ContractError, "no MiniMax-H3 text encoder"),
        ({"positive": None, "clip": {"sees": False}}, ContractError, "has not seen the pictures"),
    ],
    ids=["neither", "both", "text", "other-encoder", "blind"],
)
def test_where_the_prompt_comes_from(refer, text_encoder, inputs, error, message):
    if "clip" in inputs:
        inputs = {**inputs, "clip": text_encoder(**inputs["clip"])}
    with pytest.raises(error, match=message):
        refer(images=[picture()], **inputs)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"images": [picture(8, 8, batch=10)]}, GeometryError, "10 picture references: the model takes at most 9"),
        ({"audios": [sound()]}, GeometryError, "sound is the only reference"),
        ({"images": [picture(8, 40)]}, GeometryError, "40 x 8 pixels: its aspect is outside"),
        ({"images": [picture(channels=1)]}, ConfigError, r"images='an IMAGE of shape \[1, 64, 96, 1\]'"),
        ({"images": [picture() * float("nan")]}, ConfigError, "images='an IMAGE with NaN or infinity in it'"),
        ({"videos": [video(frames=4)]}, GeometryError, "4 frames at 24 a second: the model needs at least 5"),
        ({"videos": [FileVideo("absent.mp4")]}, FastH3Error, r"absent\.mp4 cannot be read as a video"),
        ({"images": [picture()], "audios": [{"waveform": torch.zeros(1, 2, 0), "sample_rate": 1}]}, GeometryError,
         "reference sound of shape"),
    ],
    ids=["count", "sound-alone", "aspect", "channels", "nan", "short", "no-file", "no-sound"],
)
def test_what_is_refused(refer, given, error, message):
    with pytest.raises(error, match=message):
        refer(**given)


def test_limits_count_what_is_there(refer):
    refer(images=[picture(32, 32, batch=9)])
    with pytest.raises(GeometryError, match="10 picture references"):
        refer(positive=refer.positive, images=[picture()])
    refer(positive=refer.positive, audios=[sound()])


def test_encoders_are_needed(run, refer, vae, whole_vae, bundle):
    with pytest.raises(CheckpointError, match=r"video VAE .* decoder only"):
        refer(vae=vae, images=[picture()])
    names = {"video_vae": "whole.safetensors", "audio_vae": bundle.names.audio_vae}
    deaf = run("FastH3LoadVAE", **names, dtype="auto").args[0]
    with pytest.raises(CheckpointError, match=r"audio VAE .* decoder only"):
        refer(vae=deaf, images=[picture()], audios=[sound()])
    assert whole_vae.encoder.location is None, "nothing was loaded before"


def test_an_interrupt_ends_it(refer, host, monkeypatch):
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    monkeypatch.setattr(host, "check_interrupt", stop)
    with pytest.raises(Stop):
        refer(videos=[video()])
