"""Mirrors nodes/adapters.py, on the demo's base model and adapter."""

import pytest
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, ContractError

SETTINGS = dict(strength=1.0, contract="auto", mode="auto", alpha=0.0, unmatched="refuse", adaln_source="none")


@pytest.fixture
def base(run, bundle):
    return run("FastH3LoadModel", model_name=bundle.names.base_model, contract="auto", dtype="fp32").args[0]


def test_base_and_adapter_become_the_student(run, bundle, base):
    output = run("FastH3ApplyAdapter", model=base, adapter_name=bundle.names.adapter, **SETTINGS)
    model, keys = output.args
    assert base.contract.name == "base" and model.contract.name == "preview-4"
    assert model.config.has_gates and model.store.location is None, "headers only"
    said = output.ui["text"][0]
    assert "4 created" in said and "contract preview-4" in said
    created = "transformer_blocks.3.attn.to_gate_compress.set_weight: created -> blocks.3.attn.to_gate_compress.weight"
    assert created in keys and len(keys.splitlines()) > 50


def test_twice_is_the_same_store_and_zero_is_the_base(run, bundle, base):
    def apply(**changes):
        return run("FastH3ApplyAdapter", model=base, adapter_name=bundle.names.adapter, **(SETTINGS | changes)).args[0]

    assert apply().store is apply().store
    assert apply(strength=0.0) is base


def test_a_run_reports_the_adapter(run, bundle, base, positive, latent):
    model = run("FastH3ApplyAdapter", model=base, adapter_name=bundle.names.adapter, **SETTINGS).args[0]
    report = run("FastH3Sampler", model=model, positive=positive, latent=latent, seed=1, grid="contract",
                 shift_video=0.0, shift_audio=0.0).args[1]  # fmt: skip
    adapters = report.to_dict()["model"]["adapters"]
    assert [a["name"] for a in adapters] == [bundle.names.adapter] and adapters[0]["unmatched"] == 0
    assert report.contract["name"] == "preview-4"
    assert f"adapter {bundle.names.adapter} at 1: " in report.to_text()


def test_what_does_not_go(run, bundle, base):
    name = bundle.names.adapter
    dense = run("FastH3LoadModel", model_name=bundle.names.base_model, contract="base", dtype="fp32").args[0]
    with pytest.raises(ContractError, match="does not go with contract 'base'"):
        run("FastH3ApplyAdapter", model=dense, adapter_name=name, **SETTINGS)
    with pytest.raises(CheckpointError, match="not a name inside the model folders"):
        run("FastH3ApplyAdapter", model=base, adapter_name="../x.safetensors", **SETTINGS)
    with pytest.raises(ConfigError, match="strength"):
        run("FastH3ApplyAdapter", model=base, adapter_name=name, **(SETTINGS | {"strength": float("nan")}))
    with pytest.raises(CheckpointError, match="this is an adapter"):
        run("FastH3LoadModel", model_name="as_a_model.safetensors", contract="auto", dtype="auto")


@pytest.fixture(autouse=True)
def adapter_among_the_models(folders, bundle):
    link = folders / "models" / "diffusion_models" / "as_a_model.safetensors"
    link.symlink_to(folders / "models" / "loras" / bundle.names.adapter)
    yield
    link.unlink()


def test_a_replaced_file_runs_again(bundle, folders, host):
    import os

    from comfyui_fasth3.nodes.adapters import FastH3ApplyAdapter

    before = FastH3ApplyAdapter.fingerprint_inputs(bundle.names.adapter, strength=1.0)
    os.utime(folders / "models" / "loras" / bundle.names.adapter, ns=(1, 1))
    assert FastH3ApplyAdapter.fingerprint_inputs(bundle.names.adapter, strength=1.0) != before
