"""Mirrors fasth3_core/vae/audio*.py: recorded decodes and encodes, weight norm, and what is refused."""

import json

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, GeometryError
from comfyui_fasth3.fasth3_core.vae import AudioVAE
from comfyui_fasth3.fasth3_core.vae.audio_decoder import kaiser_sinc_filter
from comfyui_fasth3.fasth3_core.vae.audio_weights import fold_weight_norm
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_thread")

ATOL = 1e-5


@pytest.fixture(scope="module")
def recorded(golden_dir):
    return load_file(golden_dir / "audio_vae.safetensors")


@pytest.fixture(scope="module")
def weights(recorded):
    return {name.removeprefix("weights."): value for name, value in recorded.items() if name.startswith("weights.")}


@pytest.fixture(scope="module")
def vae(weights):
    return AudioVAE.from_tensors(weights)


def close(actual, expected):
    return bool(((actual - expected).abs() <= ATOL).all())


@pytest.mark.parametrize("case", [0, 1])
def test_decode(vae, recorded, case):
    wave = vae.decode(recorded[f"decode{case}.latent"])
    expected = recorded[f"decode{case}.wave"]
    assert wave.shape == (2, 1, 800 * recorded[f"decode{case}.latent"].shape[2])
    assert close(wave, expected) and not close(wave * 1.01, expected)


def test_encode(vae, recorded):
    mean = vae.encode(recorded["encode.wave"])
    assert close(mean, recorded["encode.mean"]) and not close(mean * 1.01, recorded["encode.mean"])
    normalised = vae.normalise(mean)
    assert close(normalised, recorded["encode.normalised"])
    torch.testing.assert_close(vae.denormalise(normalised), mean, atol=1e-5, rtol=0)


def test_every_case_of_the_file_was_tested(golden_dir, recorded):
    decodes = {name.split(".")[0] for name in recorded if name.startswith("decode")}
    assert decodes == {"decode0", "decode1"}
    with safe_open(golden_dir / "audio_vae.safetensors", "pt") as file:
        assert json.loads(file.metadata()["kind"]) == "audio_vae"


def test_autocast_of_the_caller_changes_nothing(vae, recorded):
    latent = recorded["decode0.latent"][..., :2]
    expected, mean = vae.decode(latent), vae.encode(recorded["encode.wave"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(vae.decode(latent), expected)
        assert torch.equal(vae.encode(recorded["encode.wave"]), mean)


@pytest.mark.parametrize("form", ["folded", "parametrizations"])
def test_forms_of_weight_norm_agree(vae, weights, recorded, form):
    if form == "folded":
        other = fold_weight_norm(weights)
        assert not any("weight_g" in name or "weight_v" in name for name in other)
    else:
        other = {
            name.replace("weight_g", "parametrizations.weight.original0").replace(
                "weight_v", "parametrizations.weight.original1"
            ): value
            for name, value in weights.items()
        }
    latent = recorded["decode0.latent"][..., :2]
    assert torch.equal(AudioVAE.from_tensors(other).decode(latent), vae.decode(latent))


def test_fold_is_what_torch_computes():
    conv = torch.nn.ConvTranspose1d(6, 4, 5)
    normed = torch.nn.utils.parametrizations.weight_norm(conv)
    with torch.no_grad():
        normed.parametrizations.weight.original0.mul_(1.7)
    folded = fold_weight_norm({f"c.{name}": value for name, value in normed.state_dict().items()})
    torch.testing.assert_close(folded["c.weight"], normed.weight.detach(), atol=1e-6, rtol=0)
    assert set(folded) == {"c.weight", "c.bias"}


def test_direction_without_magnitude_is_refused(weights):
    broken = {name: value for name, value in weights.items() if name != "decoder.conv_pre.weight_g"}
    with pytest.raises(CheckpointError, match=r"decoder\.conv_pre\.weight_g"):
        AudioVAE.from_tensors(broken)


def test_filters_of_the_file_win_over_the_formula(vae, weights, recorded):
    latent = recorded["decode0.latent"][..., :2]
    without = {name: value for name, value in weights.items() if not name.endswith("filter")}
    torch.testing.assert_close(AudioVAE.from_tensors(without).decode(latent), vae.decode(latent), atol=1e-6, rtol=0)
    other = {name: value * 0.5 if name.endswith("filter") else value for name, value in weights.items()}
    assert not close(AudioVAE.from_tensors(other).decode(latent), vae.decode(latent))


def test_filter_formula(weights):
    stored = weights["decoder.activation_post.upsample.filter"]
    torch.testing.assert_close(kaiser_sinc_filter(), stored, atol=1e-7, rtol=0)
    assert kaiser_sinc_filter().sum().item() == pytest.approx(1)


@pytest.mark.parametrize("frames", [5, 22])
def test_waveform_has_the_length_of_the_video(vae, frames):
    A = round(frames / 24 * 40)
    latent = torch.randn(1, 32, 2, A)
    wave = vae.to_waveform(latent, frames)
    assert wave.shape == (1, 2, round(frames / 24 * 32000))
    full = vae.decode(vae.denormalise(latent)[0].transpose(0, 1))
    kept = min(full.shape[2], wave.shape[2])
    assert torch.equal(wave[0, :, :kept], full[:, 0, :kept])
    assert not wave[..., kept:].any()


def test_right_padding_is_silence(vae, recorded):
    wave = recorded["encode.wave"]  # 1601 samples: 3 latents
    padded = torch.nn.functional.pad(wave, (0, 2400 - wave.shape[2]))
    assert torch.equal(vae.encode(wave), vae.encode(padded))


def test_output_is_clamped_and_finite(vae):
    wave = vae.decode(torch.randn(2, 32, 5) * 50)
    assert bool(wave.isfinite().all()) and wave.abs().max() <= 1


def test_file_without_an_encoder_decodes(weights, recorded, vae):
    decoder = {name: value for name, value in weights.items() if name.startswith(("decoder.", "dec_in_proj."))}
    half = AudioVAE.from_tensors(decoder)
    assert torch.equal(half.decode(recorded["decode0.latent"]), vae.decode(recorded["decode0.latent"]))
    with pytest.raises(CheckpointError, match="decoder only"):
        half.encode(recorded["encode.wave"])


def test_stored_statistics_win(weights):
    stored = weights | {"latents_mean": torch.full((32,), 2.0), "latents_std": torch.full((1, 32, 1), 4.0)}
    vae = AudioVAE.from_tensors(stored)
    assert torch.equal(vae.denormalise(torch.ones(1, 32, 2, 3)), torch.full((1, 32, 2, 3), 6.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_refused(weights, dtype):
    with pytest.raises(ConfigError, match="float32 only"):
        AudioVAE.from_tensors(weights, dtype)


def test_wrong_shapes_are_refused(vae, weights):
    with pytest.raises(GeometryError, match=r"\[2, 31, 4\]"):
        vae.decode(torch.zeros(2, 31, 4))
    with pytest.raises(GeometryError, match=r"\[2, 2, 800\]"):
        vae.encode(torch.zeros(2, 2, 800))
    with pytest.raises(GeometryError, match=r"expected \[1, 32, 2, A\]"):
        vae.to_waveform(torch.zeros(2, 32, 4), 5)
    broken = weights | {"decoder.ups.0.0.bias": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"decoder\.ups\.0\.0\.bias has shape \[3\]"):
        AudioVAE.from_tensors(broken)


def test_moved_copy_is_equal(vae, recorded):
    assert torch.equal(vae.to("cpu").decode(recorded["decode0.latent"]), vae.decode(recorded["decode0.latent"]))
    assert vae.to("meta").device.type == "meta" and vae.device.type == "cpu"
    assert vae.nbytes == vae.to("meta").nbytes > 0
