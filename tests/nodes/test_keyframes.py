"""Mirrors nodes/keyframes.py: pictures become keyframes of the prompt, with the encoder alone in memory."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, ContractError
from comfyui_fasth3.fasth3_core.vae import VideoVAE
from comfyui_fasth3.nodes import _conditioning

HEIGHT, WIDTH = 64, 96

def picture(height=HEIGHT, width=WIDTH, channels=3):
    return torch.rand(1, height, width, channels).mul(255).round() / 255


def test_both_ends(run, whole_vae, canvas, positive, vae_weights):
    first, last = picture(), picture()
    inputs = {"positive": positive, "vae": whole_vae, "latent": canvas}
    made = run("FastH3Keyframes", **inputs, first_frame=first, last_frame=last).args[0]
    prompt = _conditioning.read(made)
    assert [k.frame for k in prompt.keyframes] == [0, 21]
    vae = VideoVAE.from_tensors(vae_weights.video)
    for image, keyframe in zip((first, last), prompt.keyframes, strict=True):
        expected = vae.condition_latent(image.permute(3, 0, 1, 2)[None])
        torch.testing.assert_close(keyframe.latent, expected, rtol=0, atol=1e-5)
    assert torch.equal(prompt.text_states, positive[0][0])
    assert _conditioning.KEYFRAMES not in positive[0][1]
    assert whole_vae.location is None and whole_vae.encoder.vae.decoder is None


def test_the_mean_is_what_comfyui_takes(run, whole_vae, canvas, positive, vae_weights):
    last = picture()
    made = run("FastH3Keyframes", positive=positive, vae=whole_vae, latent=canvas, last_frame=last, posterior="mean")
    (keyframe,) = _conditioning.read(made.args[0]).keyframes
    vae = VideoVAE.from_tensors(vae_weights.video)
    expected = vae.normalise(vae.encode(last.permute(3, 0, 1, 2)[None]))
    assert keyframe.frame == 21
    torch.testing.assert_close(keyframe.latent, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("fit", "columns"), [("cover", slice(64, 160)), ("stretch", slice(None))])
def test_fit(run, whole_vae, canvas, positive, fit, columns, vae_weights):
    """A picture that is wider than the canvas: its middle, or all of it."""
    wide = picture(HEIGHT, WIDTH + 128)
    made = run("FastH3Keyframes", positive=positive, vae=whole_vae, latent=canvas, first_frame=wide, fit=fit)
    (keyframe,) = _conditioning.read(made.args[0]).keyframes
    vae = VideoVAE.from_tensors(vae_weights.video)
    middle = vae.condition_latent(wide[:, :, 64:160].permute(3, 0, 1, 2)[None])
    assert (fit == "cover") == torch.allclose(keyframe.latent, middle, rtol=0, atol=1e-5)
    assert keyframe.latent.shape == (1, 24, 1, HEIGHT // 16, WIDTH // 16)


@pytest.mark.parametrize(("alpha", "same_as"), [("drop", None), ("white", 1.0), ("black", 0.0)])
def test_alpha(run, whole_vae, canvas, positive, alpha, same_as):
    rgba = torch.cat([picture(), torch.zeros(1, HEIGHT, WIDTH, 1)], dim=-1)
    plain = rgba[..., :3] if same_as is None else torch.full((1, HEIGHT, WIDTH, 3), same_as)
    made = [
        run("FastH3Keyframes", positive=positive, vae=whole_vae, latent=canvas, first_frame=image, alpha=alpha).args[0]
        for image in (rgba, plain)
    ]
    actual, expected = (_conditioning.read(each).keyframes[0].latent for each in made)
    assert torch.equal(actual, expected)


def test_the_sampler_takes_them(run, model, whole_vae, canvas, positive):
    """And they matter: another picture gives another video."""
    inputs = {"model": model, "latent": canvas, "seed": 1}
    videos = []
    for image in (picture(), 1 - picture()):
        made = run("FastH3Keyframes", positive=positive, vae=whole_vae, latent=canvas, first_frame=image).args[0]
        output = run("FastH3Sampler", positive=made, **inputs)
        videos.append(output.args[0]["samples"].unbind()[0])
        assert "keyframes" in output.args[1].to_text()
    assert not torch.equal(*videos)


def test_the_text_encoder_sees_what_is_encoded(run, whole_vae, canvas, text_encoder):
    """Both pictures as they were fitted, in order."""
    clip, first, last = text_encoder(), picture(HEIGHT, WIDTH + 64), picture()
    inputs = {"vae": whole_vae, "latent": canvas, "clip": clip, "prompt": "a fox"}
    made = _conditioning.read(run("FastH3Keyframes", **inputs, first_frame=first, last_frame=last).args[0])
    assert clip.text == "a fox" and [item["type"] for item in clip.beside] == ["image", "image"]
    shown = [item["data"] for item in clip.beside]
    assert torch.equal(shown[0], first[:, :, 32:-32]) and torch.equal(shown[1], last)
    assert made.token_tags.tolist() == [0, 0, 1, 1] and [k.frame for k in made.keyframes] == [0, 21]
    alone = _conditioning.read(run("FastH3Keyframes", **inputs).args[0])
    assert alone.token_tags.tolist() == [1, 1] and alone.keyframes == ()


def test_no_picture_passes_the_prompt_on(run, whole_vae, canvas, positive):
    assert run("FastH3Keyframes", positive=positive, vae=whole_vae, latent=canvas).args[0] is positive


def test_what_is_refused(run, whole_vae, vae, canvas, positive):
    inputs = {"positive": positive, "vae": whole_vae, "latent": canvas}
    with pytest.raises(ConfigError, match="positive, clip='neither'"):
        run("FastH3Keyframes", **{**inputs, "positive": None}, first_frame=picture())
    once = run("FastH3Keyframes", **inputs, first_frame=picture()).args[0]
    with pytest.raises(ContractError, match="a keyframe at frame 0 already"):
        run("FastH3Keyframes", **{**inputs, "positive": once}, first_frame=picture())
    both = run("FastH3Keyframes", **{**inputs, "positive": once}, last_frame=picture()).args[0]
    assert len(_conditioning.read(both).keyframes) == 2
    with pytest.raises(ConfigError, match=r"frame 21=.*\[1, 64, 96, 1\]"):
        run("FastH3Keyframes", **inputs, last_frame=picture(channels=1))
    with pytest.raises(CheckpointError, match="decoder only"):
        run("FastH3Keyframes", **{**inputs, "vae": vae}, first_frame=picture())
