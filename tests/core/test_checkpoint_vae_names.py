"""Both VAEs in both layouts: bitwise round trips, rows by their definition, and what is said about other files."""

import re

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint import audio_names, vae_names
from comfyui_fasth3.fasth3_core.checkpoint.load import load_audio_vae, load_video_vae
from comfyui_fasth3.fasth3_core.checkpoint.reading import MemorySource
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from safetensors.torch import save_file

from .checkpoints import assert_same, canonical, quantise, recorded


@pytest.fixture(scope="module")
def video():
    return recorded("video_vae")


@pytest.fixture(scope="module")
def audio():
    return audio_names.to_canonical(recorded("audio_vae"))


def test_recorded_video_vae_is_canonical(video):
    assert_same(vae_names.to_canonical(video), video)


@pytest.mark.parametrize("layout", vae_names.LAYOUTS)
def test_video_round_trip(video, layout):
    tensors = video | {"latents_mean": torch.randn(24), "latents_std": torch.rand(24) + 1}
    assert_same(vae_names.to_canonical(vae_names.from_canonical(tensors, layout)), tensors)


def test_single_file_rows_by_their_definition(video):
    stored = vae_names.from_canonical(video, "single-file")
    theirs, ours = "decoder.transformer_blocks.1.", "decoder.transformer_blocks.1."
    for leaf in ("weight", "bias"):
        by_head = stored[f"{theirs}attn.to_qkv.{leaf}"].unflatten(0, (2, 3, 64))
        for part, name in enumerate(("to_q", "to_k", "to_v")):
            assert torch.equal(by_head[:, part].flatten(0, 1), video[f"{ours}attn.{name}.{leaf}"])
        value, gate = video[f"{ours}ff.net.0.proj.{leaf}"].chunk(2)
        assert torch.equal(stored[f"{theirs}ff.w1.{leaf}"], torch.cat([gate, value]))
        assert torch.equal(stored[f"decoder.x_embedder.{leaf}"], video[f"decoder.proj_in.{leaf}"])
    assert "encoder.down.3.block.1.conv2.weight" in stored and "encoder.down.0.downsample.conv.bias" in stored


def test_shortcuts_are_wanted_where_channels_change(video):
    tensors = dict(video)
    tensors["encoder.down_blocks.5.resnets.0.conv1.weight"] = torch.zeros(64, 32, 3, 3, 3)
    with pytest.raises(CheckpointError, match=r"resnets.\*.conv_shortcut.weight: 1 missing"):
        vae_names.to_canonical(tensors)


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model.", "model."])
def test_prefixes_and_unused_buffers(video, prefix):
    stored = vae_names.from_canonical(video, "single-file") | {"decoder.mask_token": torch.zeros(1, 1, 128)}
    plan = vae_names.plan_video_vae(MemorySource({prefix + name: t for name, t in stored.items()}))
    assert plan.shapes == {name: tuple(t.shape) for name, t in video.items()}
    assert plan.ignored == (prefix + "decoder.mask_token",)


def test_a_decoder_on_its_own(video):
    stored = vae_names.from_canonical(video, "single-file")
    alone = {
        re.sub(r"^decoder\.(transformer_)?", "", name): t
        for name, t in stored.items()
        if name.startswith(("decoder.", "post_quant_conv."))
    }
    assert "blocks.0.attn.to_qkv.weight" in alone and "x_embedder.weight" in alone
    decoder = {name: t for name, t in video.items() if name.startswith(("decoder.", "post_quant_conv."))}
    assert_same(vae_names.to_canonical(alone), decoder)


def test_quantised_decoder_is_dequantised_by_the_loader(tmp_path, video):
    quantised, plain = dict(video), dict(video)
    for name in video:
        if re.fullmatch(r"decoder\.transformer_blocks\.\d\.(attn|ff)\..*\.weight", name):
            quantised[name] = quantise(video[name], 64)
            plain[name] = quantised[name].dequantise(torch.float32)
    vaes = []
    for stem, tensors in (("int8", quantised), ("plain", plain)):
        save(tensors, tmp_path / f"{stem}.safetensors")
        vaes.append(load_video_vae(tmp_path / f"{stem}.safetensors", "fp32"))
    z = torch.randn(1, 24, 2, 2, 2)
    torch.testing.assert_close(vaes[0].decode(z), vaes[1].decode(z), rtol=0, atol=1e-6)
    assert (vaes[0].decode(z) - load_video_vae(_saved(tmp_path, video), "fp32").decode(z)).abs().max() > 1e-4


def _saved(folder, tensors):
    return save(tensors, folder / "float.safetensors", layout="diffusers")


@pytest.mark.parametrize("layout", audio_names.LAYOUTS)
def test_audio_round_trip(audio, layout):
    tensors = audio | {"latents_mean": torch.randn(32), "latents_std": torch.rand(32) + 1}
    stored = audio_names.from_canonical(tensors, layout)
    assert any(name.endswith("weight_g") for name in stored) == (layout == "diffusers")
    assert_same(audio_names.to_canonical(stored), tensors)


def test_weight_norm_is_multiplied_out(audio):
    stored = recorded("audio_vae")
    assert set(audio_names.from_canonical(audio, "diffusers")) == set(stored)
    for name in ("encoder.block.3.block.4", "decoder.ups.2.0", "decoder.conv_post"):
        v, g = stored[f"{name}.weight_v"].double(), stored[f"{name}.weight_g"].double()
        expected = g * v / v.square().sum((1, 2), keepdim=True).sqrt()
        assert (audio[f"{name}.weight"] - expected).abs().max() <= 2e-7 * expected.abs().max()
        assert not (1.01 * audio[f"{name}.weight"] - expected).abs().max() <= 2e-7 * expected.abs().max()


def test_newer_weight_norm_names(audio):
    spelled = {
        name.replace("weight_g", "parametrizations.weight.original0").replace(
            "weight_v", "parametrizations.weight.original1"
        ): t
        for name, t in recorded("audio_vae").items()
    }
    assert_same(audio_names.to_canonical(spelled), audio)


@pytest.mark.parametrize("part", ["weight_g", "weight_v"])
def test_half_of_a_weight_norm(part):
    stored = recorded("audio_vae")
    del stored[f"decoder.conv_pre.{part}"]
    said = {"weight_g": "decoder.conv_pre.weight_g: 1 missing", "weight_v": "decoder.conv_pre.weight: 1 missing"}
    with pytest.raises(CheckpointError, match=said[part]):
        audio_names.to_canonical(stored)


@pytest.mark.parametrize(
    ("magnitude", "said"),
    [(torch.ones(1, 1, 1), r"F32 \[1, 1, 1\]"), (torch.ones(128, 1, 1, dtype=torch.int8), r"I8 \[128, 1, 1\]")],
)
def test_a_magnitude_of_another_length_or_type(magnitude, said):
    stored = recorded("audio_vae") | {"decoder.conv_pre.weight_g": magnitude}
    with pytest.raises(CheckpointError, match=rf"decoder.conv_pre.weight_v is .*its magnitude is {said}"):
        audio_names.to_canonical(stored)


@pytest.mark.parametrize("width", ["64", [64], 64.0])
def test_a_head_width_that_is_no_number(tmp_path, video, width):
    save(video, tmp_path, layout="diffusers", config={"decoder_head_dim": width})
    with pytest.raises(CheckpointError, match=f"a decoder head is {re.escape(repr(width))} wide"):
        load_video_vae(tmp_path)


def test_loaders_take_both_layouts_from_a_repository(tmp_path, video, audio):
    save(video, tmp_path / "vae", layout="diffusers", shards=2)
    save(audio, tmp_path / "audio_vae", layout="diffusers")
    save(video, tmp_path / "single" / "video.safetensors")
    save(audio, tmp_path / "single" / "audio.safetensors")
    z, s = torch.randn(1, 24, 2, 2, 2), torch.randn(2, 32, 4)
    frames = [load_video_vae(path).decode(z) for path in (tmp_path, tmp_path / "single" / "video.safetensors")]
    waves = [load_audio_vae(path).decode(s) for path in (tmp_path, tmp_path / "single" / "audio.safetensors")]
    assert torch.equal(*frames) and torch.equal(*waves)


def test_a_transformer_in_a_vae_slot(tmp_path):
    save(canonical("full"), tmp_path / "model.safetensors")
    for load in (load_video_vae, load_audio_vae):
        with pytest.raises(CheckpointError, match=r"this is a MiniMax-H3 transformer, .*belongs in FastH3 Load Model"):
            load(tmp_path / "model.safetensors")


def test_vaes_swapped(tmp_path, video, audio):
    save_file(video, tmp_path / "video.safetensors")
    save(audio, tmp_path / "audio.safetensors")
    with pytest.raises(CheckpointError, match=r"video VAE, not the MiniMax-H3 audio VAE; .*as video_vae"):
        load_audio_vae(tmp_path / "video.safetensors")
    with pytest.raises(CheckpointError, match=r"audio VAE, not the MiniMax-H3 video VAE; .*as audio_vae"):
        load_video_vae(tmp_path / "audio.safetensors")
