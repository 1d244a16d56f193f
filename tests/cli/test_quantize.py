"""Mirrors cli/quantize.py: options, output, and what is refused."""

import json

import pytest
import torch
from comfyui_fasth3.cli import main
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter
from comfyui_fasth3.fasth3_core.selftest.random_weights import random_transformer
from safetensors.torch import save_file

DIMS = dict(
    num_layers=2, hidden_size=64, num_heads=2, head_dim=32, ffn_dim=48, text_dim=20, freq_dim=32,
    time_embed_hidden_dim=64, time_embed_dim=32, rope_freq_dim=4,
)


@pytest.fixture
def base(tmp_path):
    weights = random_transformer(**DIMS, gates=False)
    save(weights, tmp_path / "base.safetensors")
    tensors, metadata = random_adapter(weights)
    save_file(tensors, tmp_path / "lora.safetensors", metadata=metadata)
    return tmp_path


def test_losses_are_printed_layer_by_layer(base, capsys):
    assert main(["quantize", str(base / "base.safetensors"), str(base / "out.safetensors")]) == 0
    said = capsys.readouterr().out
    assert said.count("lost 0.0") == 16 and "blocks.1.mlp.fc2" in said and "int8_tensorwise convrot 64" in said
    assert "16 layers lose 0.0" in said and "MB ->" in said


def test_json(base, capsys):
    out = base / "out.safetensors"
    assert main(["quantize", str(base / "base.safetensors"), str(out), "--form", "fp8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == out.stat().st_size and len(found["layers"]) == 16
    assert 0.01 < found["relative_error"] < 0.04 and found["layers"][0]["spec"]["format"] == "float8_e4m3fn"


def test_base_and_adapter_become_one_quantised_student(base):
    """Its contract travels with it; its gates are quantised like the rest."""
    out = base / "student.safetensors"
    given = [str(base / "base.safetensors"), str(out), "--adapter", str(base / "lora.safetensors")]
    assert main(["quantize", *given]) == 0
    model = load_model(out)
    assert model.contract.name == "preview-4" and len(model.store.plan.quantised) == 18
    assert json.loads(model.opened.component.metadata["fasth3.adapters"]) == ["lora.safetensors"]
    model.store.materialise(torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--group", "32"], "a power of four from 16"),
        (["--keep", "("], "a regular expression"),
        (["--adapter", "x.safetensors=much"], "FILE or FILE=STRENGTH"),
        (["--adapter", "gone.safetensors"], "does not exist"),
    ],
)
def test_what_is_refused(base, capsys, given, said):
    assert main(["quantize", str(base / "base.safetensors"), str(base / "out.safetensors"), *given]) == 1
    assert said in capsys.readouterr().err
    assert not (base / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("out", "said"),
    [("out.gguf", "ends in .safetensors"), ("no/out.safetensors", "a folder that exists"),
     ("base.safetensors", "another file than the source")],
)  # fmt: skip
def test_names_of_the_output(base, capsys, out, said):
    assert main(["quantize", str(base / "base.safetensors"), str(base / out)]) == 1
    assert said in capsys.readouterr().err
