"""Mirrors fasth3_core/vae/encoding.py and video_encoder.py: recorded encodes, clips, tiles, conditions."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from comfyui_fasth3.fasth3_core.vae import VideoVAE, sample_posterior

from .tensors import close

pytestmark = pytest.mark.usefixtures("one_thread")

MEAN_ATOL = 1e-5


def test_encode(vae, recorded):
    mean = vae.encode(recorded["encode0.pixels"])
    expected = recorded["encode0.mean"]
    assert close(mean, expected, MEAN_ATOL) and not close(mean * 1.01, expected, MEAN_ATOL)
    assert close(vae.normalise(mean), recorded["encode0.normalised"], MEAN_ATOL)
    torch.testing.assert_close(vae.denormalise(vae.normalise(mean)), mean, atol=1e-5, rtol=0)


def test_encode_single_frame(vae, recorded):
    mean, expected = vae.encode(recorded["keyframe.pixels"]), recorded["keyframe.mean"]
    assert close(mean, expected, MEAN_ATOL) and not close(mean * 1.01, expected, MEAN_ATOL)


def test_bytes_are_the_same_pixels(vae):
    frames = torch.randint(0, 256, (1, 3, 5, 32, 32), dtype=torch.uint8)
    assert torch.equal(vae.encode(frames), vae.encode(frames.float() / 255))


def test_an_encoder_alone(weights, vae, recorded):
    """What keyframes need: no decoder in memory, and not even in the file."""
    alone = VideoVAE.from_tensors(weights, only="encoder")
    assert alone.decoder is None and alone.dtype == torch.float32 and alone.nbytes < vae.nbytes
    pixels = recorded["keyframe.pixels"]
    assert torch.equal(alone.condition_latent(pixels), vae.condition_latent(pixels))
    with pytest.raises(CheckpointError, match="only the encoder was read"):
        alone.decode(recorded["decode0.latent"])
    with pytest.raises(CheckpointError, match="decoder only"):
        VideoVAE.from_tensors({n: t for n, t in weights.items() if n.startswith(("decoder.", "post_"))}, only="encoder")
    assert VideoVAE.from_tensors(weights, only="decoder").encoder is None


def test_a_clip_as_a_condition_is_a_seeded_sample(vae, recorded):
    pixels = recorded["encode0.pixels"]
    mean, logvar = vae.encode_moments(pixels)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(42))
    expected = vae.normalise((mean + (logvar / 2).exp() * noise).half().float())
    torch.testing.assert_close(vae.condition_latent(pixels), expected, atol=1e-6, rtol=0)


def test_a_picture_as_a_condition_is_a_seeded_sample_through_fp16(vae, recorded):
    mean, logvar = vae.encode_moments(recorded["keyframe.pixels"])
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(42))
    expected = vae.normalise((mean + (logvar / 2).exp() * noise).half().float())
    torch.testing.assert_close(vae.condition_latent(recorded["keyframe.pixels"]), expected, atol=1e-6, rtol=0)
    assert not torch.equal(vae.condition_latent(recorded["keyframe.pixels"], seed=43), expected)


def test_sample_posterior_scale():
    mean, logvar = torch.full((1, 4, 1, 64, 64), 3.0), torch.full((1, 4, 1, 64, 64), 2.0).log() * 2
    sample = sample_posterior(mean, logvar, torch.Generator().manual_seed(0))
    assert sample.mean().item() == pytest.approx(3, abs=0.06) and sample.std().item() == pytest.approx(2, abs=0.05)


def test_logvar_is_clamped(weights, recorded):
    loud = weights | {"quant_conv.bias": weights["quant_conv.bias"] + 1000}
    _, logvar = VideoVAE.from_tensors(loud).encode_moments(recorded["keyframe.pixels"])
    assert bool((logvar == 20).all())


def test_frames_are_encoded_in_clips_that_do_not_see_each_other(vae):
    pixels = torch.rand(1, 3, 39, 32, 32)
    mean = vae.encode(pixels)
    assert mean.shape == (1, 24, 12, 2, 2)
    last = torch.cat([pixels[:, :, 34:], pixels[:, :, -1:].expand(-1, -1, 12, -1, -1)], dim=2)
    for clip, part in enumerate([pixels[:, :, :17], pixels[:, :, 17:34], last]):
        alone = vae.encode(torch.cat([part, torch.rand(1, 3, 17, 32, 32)], dim=2))[:, :, :5]
        kept = mean[:, :, 5 * clip : 5 * clip + 5]
        assert torch.equal(alone[:, :, : kept.shape[2]], kept)


def test_encode_runs_on_the_cpu_at_64_by_64_by_5(vae):
    assert vae.encode(torch.rand(1, 3, 5, 64, 64)).shape == (1, 24, 2, 4, 4)


def test_encode_tiles_and_reports(vae):
    seen = []
    pixels = torch.rand(1, 3, 1, 64, 288)
    mean = vae.encode(pixels, on_chunk=lambda *at: seen.append(at))
    assert seen == [(1, 2), (2, 2)] and mean.shape == (1, 24, 1, 4, 18)
    left = vae.encode(pixels[..., :256])
    assert torch.equal(mean[..., :2], left[..., :2])  # the second tile starts at 32 pixels
