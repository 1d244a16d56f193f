"""Mirrors fasth3_core/vae/video*.py: recorded decodes and encodes, chunks, tile batches, and what is refused."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, FastH3Error, GeometryError, Interrupted
from comfyui_fasth3.fasth3_core.vae import VideoVAE, sample_posterior, video
from comfyui_fasth3.kernels.head_norm_rope import head_norm_rope
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_thread")

PIXEL_ATOL = 5e-4  # the file holds pixels in fp16: half a step below 1 is 2.5e-4
MEAN_ATOL = 1e-5


@pytest.fixture(scope="module")
def recorded(golden_dir):
    return {name: value.float() for name, value in load_file(golden_dir / "video_vae.safetensors").items()}


@pytest.fixture(scope="module")
def weights(recorded):
    return {name.removeprefix("weights."): value for name, value in recorded.items() if name.startswith("weights.")}


@pytest.fixture(scope="module")
def vae(weights):
    return VideoVAE.from_tensors(weights)


def close(actual, expected, atol):
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= atol).all())


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


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_statistics_that_nothing_can_be_divided_by(weights, value):
    with pytest.raises(CheckpointError, match="latents_std is zero, negative or not finite"):
        VideoVAE.from_tensors(weights | {"latents_std": torch.full((24,), value)})


def test_encode(vae, recorded):
    mean = vae.encode(recorded["encode0.pixels"])
    expected = recorded["encode0.mean"]
    assert close(mean, expected, MEAN_ATOL) and not close(mean * 1.01, expected, MEAN_ATOL)
    assert close(vae.normalise(mean), recorded["encode0.normalised"], MEAN_ATOL)
    torch.testing.assert_close(vae.denormalise(vae.normalise(mean)), mean, atol=1e-5, rtol=0)


def test_encode_single_frame(vae, recorded):
    mean, expected = vae.encode(recorded["keyframe.pixels"]), recorded["keyframe.mean"]
    assert close(mean, expected, MEAN_ATOL) and not close(mean * 1.01, expected, MEAN_ATOL)


def test_every_case_of_the_file_was_tested(recorded):
    cases = {name.split(".")[0] for name in recorded if not name.startswith("weights.")}
    assert cases == {"encode0", "keyframe", *(f"decode{i}" for i in range(5))}


def test_bytes_are_the_same_pixels(vae):
    frames = torch.randint(0, 256, (1, 3, 5, 32, 32), dtype=torch.uint8)
    assert torch.equal(vae.encode(frames), vae.encode(frames.float() / 255))


def test_an_encoder_alone(weights, vae, recorded):
    """What keyframes need: no decoder in memory, and not even in the file."""
    alone = VideoVAE.from_tensors(weights, only="encoder")
    assert alone.decoder is None and alone.dtype == torch.float32 and alone.nbytes < vae.nbytes
    pixels = recorded["keyframe.pixels"]
    assert torch.equal(alone.keyframe_latent(pixels), vae.keyframe_latent(pixels))
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


def test_keyframe_latent_is_a_seeded_sample_through_fp16(vae, recorded):
    mean, logvar = vae.encode_moments(recorded["keyframe.pixels"])
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(42))
    expected = vae.normalise((mean + (logvar / 2).exp() * noise).half().float())
    torch.testing.assert_close(vae.keyframe_latent(recorded["keyframe.pixels"]), expected, atol=1e-6, rtol=0)
    assert not torch.equal(vae.keyframe_latent(recorded["keyframe.pixels"], seed=43), expected)
    with pytest.raises(GeometryError, match=r"\[1, 3, 1, H, W\]"):
        vae.keyframe_latent(recorded["encode0.pixels"])


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_loses_no_more_than_plain_torch(vae, weights, recorded, dtype):
    """Against autocast over the fp32 weights, the same islands in torch's own words."""
    latent = recorded["decode1.latent"]
    exact = vae.decode(latent)
    error = (VideoVAE.from_tensors(weights, dtype).decode(latent) - exact).square().mean().sqrt()
    raw = vae.denormalise(latent)[0].permute(1, 2, 3, 0)[None, :, :, :16]
    rotations = vae.decoder.rotations((7, 2, 16), vae.device)
    with torch.autocast("cpu", dtype=dtype):
        plain = vae.decoder(raw, rotations)
    plain_error = (plain.float() - vae.decoder(raw, rotations)).square().mean().sqrt() * 0.225
    assert 0 < error <= 2 * plain_error
    assert (exact * 1.01 - exact).square().mean().sqrt() > 2 * plain_error


def test_int8_weights_stay_int8_and_decode_as_what_they_stand_for(weights, recorded):
    """ConvRot rows of 128 inputs in groups of 64 and 16; norms, biases and the rest are float."""
    quantised, plain = dict(weights), dict(weights)
    for name in [n for n in weights if n.startswith("decoder.transformer_blocks.") and weights[n].ndim == 2]:
        scale = weights[name].abs().amax(dim=1, keepdim=True) / 100
        data = (weights[name] / scale).round().to(torch.int8)
        quantised[name] = QuantizedWeight(data, scale, "int8_tensorwise", 64)
        plain[name] = quantised[name].dequantise(torch.float32)
    vae, exact = VideoVAE.from_tensors(quantised), VideoVAE.from_tensors(plain)
    latent = recorded["decode0.latent"]
    pixels = vae.decode(latent)
    torch.testing.assert_close(pixels, exact.decode(latent), rtol=0, atol=2e-5)
    assert (pixels - pixels * 1.01).abs().max() > 2e-5
    for block in vae.decoder.blocks:
        layers = (block.qkv, block.out, block.ff_in, block.ff_out)
        assert all(layer.weight.data.dtype == torch.int8 and layer.weight.group == 64 for layer in layers)
    assert vae.nbytes < 0.8 * exact.nbytes
    moved = vae.to("meta")
    assert moved.decoder.blocks[0].qkv.weight.data.device.type == "meta"


def test_fp8_quantises_the_blocks_products_alone(weights, recorded):
    vae = VideoVAE.from_tensors(weights, torch.float8_e4m3fn)
    assert vae.dtype == vae.decoder.proj_out.weight.dtype == torch.bfloat16
    block = vae.decoder.blocks[0]
    assert {layer.weight.data.dtype for layer in (block.qkv, block.out, block.ff_in, block.ff_out)} == {
        torch.float8_e4m3fn
    }
    pixels, exact = vae.decode(recorded["decode0.latent"]), recorded["decode0.pixels"]
    psnr = -10 * (pixels - exact).square().mean().log10().item()
    assert 40 < psnr < 80


def test_islands_are_fp32(weights):
    vae = VideoVAE.from_tensors(weights, torch.float16)
    block = vae.decoder.blocks[0]
    assert {block.norm1.dtype, block.norm2.dtype, block.scale1.dtype, block.scale2.dtype} == {torch.float32}
    assert vae.decoder.suffix.dtype == vae.decoder.norm_out.weight.dtype == torch.float32
    assert vae.encoder.conv_in.weight.dtype == torch.float32
    assert {block.qkv.weight.dtype, block.ff_out.bias.dtype, vae.decoder.proj_out.weight.dtype} == {torch.float16}


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


@pytest.mark.parametrize("depth", [24])
def test_24_blocks_are_refused(weights, depth):
    deep = dict(weights)
    for name, value in weights.items():
        if name.startswith("decoder.transformer_blocks.0."):
            for index in range(2, depth):
                deep[name.replace("blocks.0.", f"blocks.{index}.")] = value
    with pytest.raises(CheckpointError, match=r"24 blocks is either Sol-H3-VAE .* causal StreamRender"):
        VideoVAE.from_tensors(deep)


@pytest.mark.parametrize("depth", [1, 3])
def test_any_other_number_of_blocks(weights, depth):
    names = [name for name in weights if name.startswith("decoder.transformer_blocks.0.")]
    other = {name: value for name, value in weights.items() if not name.startswith("decoder.transformer_blocks.")}
    for index in range(depth):
        other |= {name.replace("blocks.0.", f"blocks.{index}."): weights[name] for name in names}
    vae = VideoVAE.from_tensors(other)
    assert len(vae.decoder.blocks) == depth
    assert bool(vae.decode(torch.randn(1, 24, 1, 2, 2)).isfinite().all())


def test_file_without_an_encoder_decodes(vae, weights, recorded):
    decoder = {name: value for name, value in weights.items() if not name.startswith(("encoder.", "quant_conv."))}
    half = VideoVAE.from_tensors(decoder)
    assert torch.equal(half.decode(recorded["decode0.latent"]), vae.decode(recorded["decode0.latent"]))
    with pytest.raises(CheckpointError, match="decoder only"):
        half.encode(recorded["keyframe.pixels"])


def test_stored_statistics_win(weights):
    stored = weights | {"latents_mean": torch.full((24,), 2.0), "latents_std": torch.full((1, 24, 1, 1, 1), 4.0)}
    vae = VideoVAE.from_tensors(stored)
    assert torch.equal(vae.denormalise(torch.ones(1, 24, 1, 2, 2)), torch.full((1, 24, 1, 2, 2), 6.0))
    with pytest.raises(CheckpointError, match="5 values of latents_std for 24"):
        VideoVAE.from_tensors(weights | {"latents_std": torch.ones(5)})


def test_head_dim_is_an_argument(weights, recorded, vae):
    other = VideoVAE.from_tensors(weights, head_dim=32)
    assert not torch.equal(other.decode(recorded["decode0.latent"]), vae.decode(recorded["decode0.latent"]))
    with pytest.raises(ConfigError, match="divides the width 128"):
        VideoVAE.from_tensors(weights, head_dim=48)
    with pytest.raises(ConfigError, match="head_dim=-8"):
        VideoVAE.from_tensors(weights, head_dim=-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder.transformer_blocks.0.attn.norm_q.weight": torch.ones(64)}, "not part of this architecture"),
        ({"encoder.down_blocks.0.resnets.0.extra": torch.ones(3)}, "not part of this architecture"),
        ({"decoder.proj_out.bias": torch.ones(5)}, r"decoder\.proj_out\.bias has shape \[5\], expected \[3072\]"),
        ({"decoder.proj_in.bias": torch.ones(128, dtype=torch.int8)}, "dequantised"),
        ({"decoder.register_tokens": None}, r"no tensor decoder\.register_tokens"),
        ({"decoder.transformer_blocks.0.scale1": None}, "numbered"),
        ({"encoder.down_blocks.3.downsamplers.0.conv.weight": None}, "3 downsamplers in 6 stages"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(weights, change, message):
    broken = {name: value for name, value in (weights | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        VideoVAE.from_tensors(broken)


def test_other_files_are_refused():
    with pytest.raises(CheckpointError, match="not an H3 ViT decoder"):
        VideoVAE.from_tensors({"decoder.1.conv.0.weight": torch.ones(3)})


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


def test_moved_copy_is_equal(vae, recorded):
    assert torch.equal(vae.to("cpu").decode(recorded["decode0.latent"]), vae.decode(recorded["decode0.latent"]))
    away = vae.to("meta")
    assert away.device.type == away.decoder.blocks[0].scale1.device.type == "meta" and vae.device.type == "cpu"
    assert away.nbytes == vae.nbytes > 0
