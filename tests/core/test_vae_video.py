"""Mirrors fasth3_core/vae/video.py and decoding.py: recorded decodes, chunks, tile batches, what stops and errors."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ConfigError, FastH3Error, GeometryError, Interrupted
from comfyui_fasth3.fasth3_core.vae import VideoVAE, video
from comfyui_fasth3.kernels.head_norm_rope import head_norm_rope

from .tensors import close

pytestmark = pytest.mark.usefixtures("one_thread")

PIXEL_ATOL = 5e-4  # the file holds pixels in fp16: half a step below 1 is 2.5e-4


@pytest.mark.parametrize("case", range(5))
def test_decode(vae, recorded, case):
    pixels, expected = vae.decode(recorded[f"decode{case}.latent"]), recorded[f"decode{case}.pixels"]
    assert close(pixels, expected, PIXEL_ATOL) and not close(pixels * 1.01, expected, PIXEL_ATOL)
    assert pixels.dtype == torch.float32 and pixels.min() >= 0 and pixels.max() <= 1


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, float("nan")), (torch.float16, 6e4)])
def test_pixels_that_are_none_are_an_error_not_a_black_or_white_picture(weights, recorded, dtype, value):
    """Products with 6e4 pass the range of fp16, and infinity would be cut to white."""
    last = "decoder.proj_out.weight"
    vae = VideoVAE.from_tensors(weights | {last: weights[last].sign() * value}, dtype)
    with pytest.raises(FastH3Error, match=rf"clips \[0\] of 1 were decoded to NaN or infinity in {dtype}"):
        vae.decode(recorded["decode0.latent"])


def test_every_case_of_the_file_was_tested(recorded):
    cases = {name.split(".")[0] for name in recorded if not name.startswith("weights.")}
    assert cases == {"encode0", "keyframe", *(f"decode{i}" for i in range(5))}


@pytest.mark.parametrize("tile_batch", [1, 2, 3, 7])
def test_tile_batch_does_not_change_pixels_on_the_cpu(vae, recorded, tile_batch):
    latent = recorded["decode4.latent"]
    assert torch.equal(vae.decode(latent, tile_batch=tile_batch), vae.decode(latent))


def test_tiles_in_one_call_are_the_same_tiles(vae):
    """What a GPU does: several tiles a call. Another batch rounds differently, by a few fp32 steps."""
    raw = torch.randn(3, 7, 2, 3, 24)
    rotations = vae.decoder.rotations((7, 2, 3), vae.device)
    together = vae.decoder(raw, rotations)
    alone = torch.cat([vae.decoder(one[None], rotations) for one in raw])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("latents", [1, 2, 3, 6, 7, 12, 13])
def test_chunks_concatenate_to_the_decode(vae, latents):
    latent = torch.randn(1, 24, latents, 2, 2)
    parts = list(vae.decode_chunks(latent))
    assert torch.equal(torch.cat(parts, dim=2), vae.decode(latent))
    assert all(part.dtype == torch.float32 and part.shape[2] <= 17 for part in parts)


def test_chunks_stay_valid_while_the_decode_goes_on(vae):
    """A consumer may keep a chunk: nothing later writes into it."""
    latent = torch.randn(1, 24, 12, 2, 2)
    kept, copies = [], []
    for part in vae.decode_chunks(latent):
        kept.append(part)
        copies.append(part.clone())
    assert len(kept) == 3 and all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_a_chunk_comes_before_later_latents_are_decoded(vae):
    calls = []
    parts = vae.decode_chunks(torch.randn(1, 24, 12, 2, 2), on_chunk=lambda *at: calls.append(at))
    next(parts)
    assert calls == [(1, 2)]
    parts.close()


def test_progress_counts_tiles(vae, recorded):
    seen = []
    vae.decode(recorded["decode4.latent"], on_chunk=lambda *at: seen.append(at))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_interrupt_passes_through_and_the_next_decode_succeeds(vae, recorded):
    calls = []

    def stop():
        calls.append(None)
        if len(calls) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        vae.decode(recorded["decode4.latent"], check_interrupt=stop)
    assert len(calls) == 2
    assert close(vae.decode(recorded["decode0.latent"]), recorded["decode0.pixels"], PIXEL_ATOL)


def test_autocast_of_the_caller_changes_nothing(vae, weights, recorded):
    half = VideoVAE.from_tensors(weights, torch.float16)
    latent, pixels = recorded["decode0.latent"], recorded["keyframe.pixels"]
    expected = [vae.decode(latent), half.decode(latent), vae.encode(pixels)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = [vae.decode(latent), half.decode(latent), vae.encode(pixels)]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_rotation_is_the_half_split_one():
    """Channels reordered so that pairs are neighbours: same as normalising and rotating (i, i + 24) in place."""
    x, angles = torch.randn(5, 2, 64), torch.randn(5, 24)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    first, second, rest = normed.split([24, 24, 16], dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    order = torch.cat([torch.arange(48).view(2, 24).T.flatten(), torch.arange(48, 64)])
    padded = torch.nn.functional.pad(angles, (0, 8))
    actual = x[..., order]
    head_norm_rope(actual, None, torch.polar(torch.ones_like(padded), padded), 1e-5)
    torch.testing.assert_close(actual, expected[..., order], atol=2e-6, rtol=0)


def test_out_of_memory_halves_an_automatic_batch(vae, recorded, monkeypatch):
    """Four tiles a call do not fit here, and two do not: the decode goes on one by one with the same pixels."""
    latent = recorded["decode4.latent"]
    expected, sizes = vae.decode(latent), []
    real = type(vae.decoder).__call__

    def tight(self, latents, rotations):
        sizes.append(len(latents))
        if len(latents) > 1:
            raise torch.OutOfMemoryError("no room")
        return real(self, latents, rotations)

    monkeypatch.setattr(type(vae.decoder), "__call__", tight)
    monkeypatch.setattr(video, "Run", lambda *args: batched(real_run(*args)))
    assert torch.equal(vae.decode(latent), expected)
    assert sizes == [4, 2, 1, 1, 1, 1]
    with pytest.raises(torch.OutOfMemoryError):
        vae.decode(latent, tile_batch=4)


real_run = video.Run


def batched(run):
    run.tiles = run.tile_batch or 4
    return run


def test_wrong_arguments_are_refused(vae, weights):
    with pytest.raises(GeometryError, match=r"\[1, 16, 2, 2, 2\]: expected \[1, 24, T, h, w\]"):
        vae.decode(torch.zeros(1, 16, 2, 2, 2))
    with pytest.raises(GeometryError, match="0 latent frames"):
        vae.decode_chunks(torch.zeros(1, 24, 0, 2, 2))
    with pytest.raises(ConfigError, match="tile_batch=-1"):
        vae.decode(torch.zeros(1, 24, 1, 2, 2), tile_batch=-1)
    with pytest.raises(ConfigError, match="float64"):
        VideoVAE.from_tensors(weights, torch.float64)
    with pytest.raises(GeometryError, match="40 pixels"):
        vae.encode(torch.zeros(1, 3, 1, 40, 32))
    with pytest.raises(GeometryError, match=r"\[1, 4, 1, 32, 32\]"):
        vae.encode(torch.zeros(1, 4, 1, 32, 32))
    with pytest.raises(GeometryError, match=r"\[1, 3, 1, 16, 32\]: a side has at least 32"):
        vae.encode(torch.zeros(1, 3, 1, 16, 32))
