"""Mirrors fasth3_core/vae/decoder_weights.py and tensors.py: precisions, numbers of blocks, files that do not fit."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError
from comfyui_fasth3.fasth3_core.vae import VideoVAE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_statistics_that_nothing_can_be_divided_by(weights, value):
    with pytest.raises(CheckpointError, match="latents_std is zero, negative or not finite"):
        VideoVAE.from_tensors(weights | {"latents_std": torch.full((24,), value)})


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


def test_moved_copy_is_equal(vae, recorded):
    assert torch.equal(vae.to("cpu").decode(recorded["decode0.latent"]), vae.decode(recorded["decode0.latent"]))
    away = vae.to("meta")
    assert away.device.type == away.decoder.blocks[0].scale1.device.type == "meta" and vae.device.type == "cpu"
    assert away.nbytes == vae.nbytes > 0
