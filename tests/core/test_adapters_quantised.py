"""Adapters on quantised weights: kept beside them, on the unrotated activation, and as good as on the plain weight."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.apply import Settings, apply_adapter
from comfyui_fasth3.fasth3_core.adapters.weight import AdaptedWeight, Increment
from comfyui_fasth3.fasth3_core.checkpoint import names
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import ConfigError
from comfyui_fasth3.fasth3_core.model.linear import linear
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.request import Request
from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter
from comfyui_fasth3.fasth3_core.weights.fp8 import Fp8Weight, to_fp8
from comfyui_fasth3.kernels.int8_linear import hadamard

from .adapter_corpus import SPELLINGS, changes, spelled
from .checkpoints import quantise
from .test_adapters import DIMS, loaded, write
from .test_adapters_fastvideo import student
from .tiny import TEXT_DIM, tiny_tensors

GROUP = 16


def fp8(weight: torch.Tensor) -> QuantizedWeight:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return QuantizedWeight((weight.float() / scale).to(torch.float8_e4m3fn), scale, "float8_e4m3fn")


FORMS = {"int8 convrot": lambda w: quantise(w, GROUP), "int8": quantise, "fp8": fp8}


def quantised(tensors: dict, form: str) -> dict:
    """Every large matrix of the blocks quantised but one, as files that mix forms have it."""
    return {
        name: FORMS[form](t) if (".attn." in name and t.ndim == 2) or name.endswith("mlp.fc2.weight") else t
        for name, t in tensors.items()
    }


def plain(tensors: dict) -> dict:
    return {n: t.dequantise(torch.float32) if isinstance(t, QuantizedWeight) else t for n, t in tensors.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", names.LAYOUTS)
def test_what_the_quantised_weights_stand_for_gets_the_change(tmp_path, form, layout):
    base = quantised(tiny_tensors(gates=False), form)
    save(base, tmp_path / "m" / "transformer", layout=layout, config={"rope_freq_dim": 4})
    tensors, metadata = random_adapter(plain(base), dtype=torch.float32)
    path = write(tmp_path / "a.safetensors", tensors, metadata)
    model, report = apply_adapter(load_model(tmp_path / "m"), path)
    have = loaded(model)
    kept = {name: w for name, w in have.items() if isinstance(w, AdaptedWeight)}
    assert {name for name, w in base.items() if isinstance(w, QuantizedWeight)} == kept.keys()
    for name, weight in kept.items():
        assert torch.equal(weight.base.data, base[name].data) and weight.base.spec == base[name].spec, name
    assert report.count("beside") and report.count("created") == 2 and model.details["quantised_layers"] == 12
    flat = {name: w.dequantise(torch.float32) if name in kept else w for name, w in have.items()}
    want = {**plain(base), **student(plain(base), tensors)}
    for name, value in flat.items():
        torch.testing.assert_close(value.double(), want[name].double(), rtol=0, atol=2e-6, msg=name)
    # a second one on top, whatever the first left
    pairs = spelled(changes(DIMS), **SPELLINGS[0])
    twice, _ = apply_adapter(model, write(tmp_path / "b.safetensors", pairs))
    merged = {n: w.dequantise(torch.float32) if isinstance(w, AdaptedWeight) else w for n, w in loaded(twice).items()}
    back, _ = apply_adapter(twice, tmp_path / "b.safetensors", Settings(strength=-1.0))
    assert sum(isinstance(w, AdaptedWeight) for w in loaded(back).values()) == 12
    assert (merged["blocks.1.attn.qkv_proj.weight"] - flat["blocks.1.attn.qkv_proj.weight"]).abs().max() > 0.1
    after = {n: w.dequantise(torch.float32) if isinstance(w, AdaptedWeight) else w for n, w in loaded(back).items()}
    for name, value in after.items():
        torch.testing.assert_close(value, flat[name], rtol=0, atol=4e-6, msg=name)


def test_merging_into_quantised_weights_is_refused(tmp_path):
    save(quantised(tiny_tensors(gates=False), "int8"), tmp_path / "m.safetensors")
    path = write(tmp_path / "a.st", spelled(changes(DIMS), **SPELLINGS[0]))
    with pytest.raises(ConfigError, match=r"mode='merge'.*6 of its weights.*keeps the adapter beside"):
        apply_adapter(load_model(tmp_path / "m.safetensors"), path, Settings(mode="merge"))


def test_a_difference_makes_a_quantised_layer_float(tmp_path):
    base = quantised(tiny_tensors(gates=False), "int8")
    save(base, tmp_path / "m.safetensors")
    change = torch.randn(64, 64) * 0.1
    model, report = apply_adapter(
        load_model(tmp_path / "m.safetensors"),
        write(tmp_path / "a.st", {"transformer_blocks.0.attn.to_out.0.diff": change}),
    )
    have = loaded(model)["blocks.0.attn.out_proj.weight"]
    assert have.dtype == torch.bfloat16 and report.count("merged") == 1 and model.details["quantised_layers"] == 11
    want = base["blocks.0.attn.out_proj.weight"].dequantise(torch.float32) + change
    assert torch.equal(have, want.bfloat16())


def test_increments_see_the_unrotated_activation():
    """An int8 ConvRot product rotates its input; the factors of an adapter live in the basis of the layer."""
    x = torch.randn(7, 64)
    base = quantise(torch.randn(32, 64) / 8, GROUP)
    increment = Increment(torch.randn(4, 64) / 8, torch.randn(32, 4) / 2, 0.7, 0)
    have = linear(x, AdaptedWeight(base, (increment,)))
    delta = 0.7 * increment.up.double() @ increment.down.double()
    want = x.double() @ (base.dequantise(torch.float32).double() + delta).T
    torch.testing.assert_close(have.double(), want, rtol=0, atol=1e-5)
    rotated = (x.view(-1, GROUP) @ hadamard(GROUP)).view_as(x)
    wrong = linear(x, base) + 0.7 * rotated @ increment.down.T @ increment.up.T
    assert (wrong - want).abs().max() > 0.1
    with pytest.raises(AssertionError):
        torch.testing.assert_close(have.double() * 1.01, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_fused_result_and_a_bias(dtype):
    weight, bias = torch.randn(48, 64) / 8, torch.randn(48)
    parts = tuple(Increment(torch.randn(r, 64) / 8, torch.randn(16, r) / 2, s, start)
                  for r, s, start in ((2, 1.0, 0), (5, -0.5, 16), (3, 2.0, 32), (1, 1.0, 32)))  # fmt: skip
    x = torch.randn(2, 5, 64)
    want = x.double() @ AdaptedWeight(weight.double(), ()).base.T + bias.double()
    for part in parts:
        want[..., part.rows] += part.scale * (x.double() @ part.down.double().T) @ part.up.double().T
    adapted = AdaptedWeight(weight, parts)
    low = adapted.with_tensors([t.to(dtype) for t in adapted.tensors()])
    have = linear(x.to(dtype), low, bias.to(dtype)).double()
    # bf16: at most twice the error of the plain product with the merged weight
    merged = adapted.dequantise(torch.float32)
    plain = (x.to(dtype) @ merged.to(dtype).T + bias.to(dtype)).double()
    limit = 2 * float((plain - want).norm() / want.norm()) + 1e-6
    assert float((have - want).norm() / want.norm()) <= limit
    assert float((have * 1.01 - want).norm() / want.norm()) > limit


@pytest.mark.parametrize("form", ["plain", *FORMS])
def test_a_run_with_increments_is_the_run_with_the_merged_weights(tmp_path, form):
    """fp32, four forwards of the student: base + adapter, in both modes, against the student's own file."""
    base = tiny_tensors(gates=False)
    base = base if form == "plain" else quantised(base, form)
    tensors, metadata = random_adapter(plain(base), dtype=torch.float32)
    path = write(tmp_path / "a.safetensors", tensors, metadata)
    save(base, tmp_path / "base.safetensors")
    whole = {name: t.float() for name, t in {**plain(base), **student(plain(base), tensors)}.items()}
    save(whole, tmp_path / "student.safetensors")
    model = load_model(tmp_path / "base.safetensors", dtype="fp32")
    runs = [
        apply_adapter(model, path)[0],
        apply_adapter(model, path, Settings(mode="beside"))[0],
        load_model(tmp_path / "student.safetensors", contract="preview-4", dtype="fp32"),
    ]
    request = Request(
        text_states=torch.randn(1, 5, TEXT_DIM), token_tags=torch.ones(5, dtype=torch.int64), latent_frames=2,
        latent_height=4, latent_width=4, audio_latents=8, seed=0,
    )  # fmt: skip
    for run in runs:
        run.store.materialise(torch.device("cpu"))
    merged, beside, own = (sample(run, request, device=torch.device("cpu")) for run in runs)
    for result in (merged, beside):
        for have, want in ((result.video, own.video), (result.audio, own.audio)):
            torch.testing.assert_close(have, want, rtol=0, atol=1e-4)
            with pytest.raises(AssertionError):
                torch.testing.assert_close(have * 1.01, want, rtol=0, atol=1e-4)
    half = apply_adapter(model, path, Settings(strength=0.5))[0]
    half.store.materialise(torch.device("cpu"))
    other = sample(half, request, device=torch.device("cpu"))
    assert (other.video - own.video).abs().max() > 1e-2, "the adapter must matter here"
    assert own.report.contract["name"] == "preview-4"
    assert merged.report.model["adapters"][0]["created"] == 2


@pytest.mark.parametrize("form", ["plain", "int8"])
def test_products_in_fp8_are_made_from_the_merged_weights(tmp_path, form):
    """dtype "fp8" quantises projections as they are read: the adapter is merged before that, and the report says so."""
    base = tiny_tensors(gates=False)
    base = base if form == "plain" else quantised(base, form)
    save(base, tmp_path / "m.safetensors")
    tensors, metadata = random_adapter(plain(base), dtype=torch.float32)
    path = write(tmp_path / "a.safetensors", tensors, metadata)
    model, report = apply_adapter(load_model(tmp_path / "m.safetensors", dtype="fp8"), path, Settings(mode="beside"))
    model.store.materialise(torch.device("cpu"))
    want = {**plain(base), **student(plain(base), tensors)}
    for i in range(2):
        for name, weight in model.store.block(i).items():
            if isinstance(weight, Fp8Weight):
                made = to_fp8(want[f"blocks.{i}.{name}"].to(weight.dtype))
                made = made.dequantise(torch.float32)
                # a last bit of fp32 tips a few values to the next of fp8; rounding to fp8 itself loses 0.026
                assert (weight.dequantise(torch.float32) - made).norm() < 5e-3 * made.norm(), name
            assert not isinstance(weight, AdaptedWeight), name
    kept = {row.target for row in report.rows if row.outcome == "beside"}
    assert kept and all(not name.startswith("blocks.") for name in kept), "the refiner stays as it is"
