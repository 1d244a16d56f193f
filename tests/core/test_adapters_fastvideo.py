"""FastVideo's adapters of the FastH3 students: exact weights, gates that the base lacks, counts, and the contract."""

import json
import re

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.apply import Settings, apply_adapter
from comfyui_fasth3.fasth3_core.checkpoint import names
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ContractError
from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter
from safetensors.torch import save_file

from .test_adapters import assert_weights, loaded, write
from .tiny import tiny_tensors

CONFIG = {"rope_freq_dim": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(canonical weights, path, tensors and metadata of a VSA adapter, its path)."""
    root, weights = tmp_path_factory.mktemp("fastvideo"), tiny_tensors(gates=False)
    save(weights, root / "base", layout="diffusers", shards=2, config=CONFIG)
    tensors, metadata = random_adapter(weights, dtype=torch.float32)
    return weights, root / "base", tensors, metadata, write(root / "vsa.safetensors", tensors, metadata)


def student(weights: dict, tensors: dict, strength: float = 1.0) -> dict:
    """Canonical weights by the rules of the format, in fp64 under diffusers names."""
    out = {name: t.double() for name, t in names.from_canonical(weights, "diffusers").items()}
    for name, tensor in tensors.items():
        layer, part = re.fullmatch(r"(.+)\.(lora_A\.weight|lora_B\.weight|diff|diff_b|set_weight)", name).groups()
        if part == "lora_A.weight":
            out[f"{layer}.weight"] += strength * tensors[f"{layer}.lora_B.weight"].double() @ tensor.double()
        elif part in ("diff", "diff_b"):
            out[f"{layer}.{'weight' if part == 'diff' else 'bias'}"] += strength * tensor.double()
        elif part == "set_weight":
            out[f"{layer}.weight"] = strength * tensor.double()
    return names.to_canonical(out)


@pytest.mark.parametrize("strength", [1.0, 0.3, -1.0])
@pytest.mark.parametrize("layout", names.LAYOUTS)
def test_weights_of_the_student(base, tmp_path, layout, strength):
    weights, _, tensors, _, path = base
    save(weights, tmp_path / "transformer", layout=layout, config=CONFIG)
    model, report = apply_adapter(load_model(tmp_path), path, Settings(strength=strength))
    assert_weights(model, {**weights, **student(weights, tensors, strength)})
    assert report.matched == len(tensors) and report.count("created") == 2 and not report.warnings
    assert bool(model.departures) is (strength != 1.0)


def test_rounded_once_and_no_matter_where_a_layer_is_changed_twice(base, tmp_path):
    weights, _, tensors, metadata, _ = base
    half = {name: t.bfloat16() for name, t in weights.items()}
    save(half, tmp_path / "base.safetensors", metadata={})
    twice = tensors | {"transformer_blocks.0.attn.to_k.diff": torch.randn(64, 64) * 0.02}
    metadata = metadata | {"diff_tensors": str(int(metadata["diff_tensors"]) + 1)}
    model, _ = apply_adapter(load_model(tmp_path / "base.safetensors"), write(tmp_path / "a.st", twice, metadata))
    want, have = student(half, twice), loaded(model)
    for name, value in want.items():
        off = have[name] != value.float().to(have[name].dtype)
        assert off.float().mean() < 1e-3, name


def test_base_and_adapter_become_the_student_by_the_metadata(base):
    _, folder, _, _, path = base
    model = load_model(folder)
    assert model.contract.name == "base" and model.details["contract_by"].startswith("default")
    adapted, _ = apply_adapter(model, path)
    assert adapted.contract.name == "preview-4" and adapted.config.has_gates and not model.config.has_gates
    assert "VSA-DataFree" in adapted.contract.about
    assert adapted.details["adapters"][0]["created"] == 2


@pytest.mark.parametrize(
    ("name", "contract"),
    [
        ("FastVideo/FastVideo-FastH3-8-Step-V2", "v2-8"),
        ("FastVideo/FastVideo-FastH3-4-step-v1.2", "preview-4"),
        ("FastVideo/FastVideo-Minimax-FastH3-Preview-v0.1", "preview-4"),
    ],
)
def test_students_that_the_metadata_names(base, tmp_path, name, contract):
    _, folder, tensors, metadata, _ = base
    path = write(tmp_path / "a.safetensors", tensors, metadata | {"finetuned_model": name})
    assert apply_adapter(load_model(folder), path)[0].contract.name == contract


def test_a_schedule_in_the_metadata_wins(base, tmp_path):
    _, folder, tensors, metadata, _ = base
    said = {"dmd_denoising_steps": json.dumps([999, 600, 300]), "vsa_sparsity": "0.7", "model_id": "mine"}
    adapted, _ = apply_adapter(load_model(folder), write(tmp_path / "a.safetensors", tensors, metadata | said))
    assert (adapted.contract.points, adapted.contract.sparsity) == (4, 0.7)


def test_a_damaged_schedule_is_said_to_be_the_adapters(base, tmp_path):
    _, folder, tensors, metadata, _ = base
    said = {"dmd_denoising_steps": json.dumps([300, 600])}
    path = write(tmp_path / "a.safetensors", tensors, metadata | said)
    with pytest.raises(ContractError, match=r"^the metadata of a\.safetensors says dmd_denoising_steps=\[300, 600\]"):
        apply_adapter(load_model(folder), path)
    adapted, _ = apply_adapter(load_model(folder), path, contract="preview-4")
    assert "the record is not followed: the metadata of a.safetensors says" in adapted.departures[0]


def test_an_unknown_student_asks_for_its_contract(base, tmp_path):
    _, folder, tensors, metadata, _ = base
    path = write(tmp_path / "a.safetensors", tensors, metadata | {"finetuned_model": "somebody/else"})
    with pytest.raises(ContractError, match="Set contract to 'preview-4'"):
        apply_adapter(load_model(folder), path)
    adapted, report = apply_adapter(load_model(folder), path, contract="v2-8")
    assert adapted.contract.name == "v2-8" and "not known" in report.warnings[0]


def test_dense_student(base, tmp_path):
    weights, folder, *_ = base
    name = "FastVideo/FastVideo-FastH3-4-step-Preview-v1-Dense-DataFree"
    tensors, metadata = random_adapter(weights, gates=False, student=name)
    adapted, _ = apply_adapter(load_model(folder), write(tmp_path / "a.safetensors", tensors, metadata))
    assert adapted.contract.name == "preview-4-dense" and not adapted.config.has_gates
    assert_weights(adapted, {**weights, **student(weights, tensors)})


@pytest.mark.parametrize("dense", ["base", "preview-4-dense"])
def test_vsa_adapter_on_a_dense_contract(base, dense):
    _, folder, _, _, path = base
    with pytest.raises(ContractError, match=f"does not go with contract '{dense}'.*attends densely"):
        apply_adapter(load_model(folder, contract=dense), path)
    with pytest.raises(ContractError, match="attends densely"):
        apply_adapter(load_model(folder), path, contract=dense)
    adapted, _ = apply_adapter(load_model(folder, contract=dense), path, contract="preview-4")
    assert adapted.contract.name == "preview-4"


def test_a_style_on_top_keeps_the_student(base, tmp_path):
    _, folder, _, _, path = base
    model, _ = apply_adapter(load_model(folder), path)
    style = {"blocks.0.mlp.fc2.lora_A.weight": torch.randn(2, 48), "blocks.0.mlp.fc2.lora_B.weight": torch.randn(64, 2)}
    styled, _ = apply_adapter(model, write(tmp_path / "s.safetensors", style))
    assert styled.contract is model.contract and len(styled.details["adapters"]) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"low_rank_tensors": "7"}, r"says low_rank_tensors=7, the file has \d+"),
        ({"diff_tensors": "0"}, "says diff_tensors=0"),
        ({"set_weight_tensors": "50"}, "says set_weight_tensors=50, the file has 2"),
        ({"rank": "64"}, "says rank=64, the factors have 4"),
        ({"format": "fastvideo-lora-v3"}, "is of format 'fastvideo-lora-v3'"),
    ],
)
def test_metadata_that_does_not_match(base, tmp_path, change, said):
    _, folder, tensors, metadata, _ = base
    metadata = {key: value for key, value in (metadata | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=said):
        apply_adapter(load_model(folder), write(tmp_path / "a.safetensors", tensors, metadata))


def test_converted_files_may_state_no_counts(base, tmp_path):
    """The format is used for adapters that others converted, which keep only its name."""
    _, folder, tensors, metadata, _ = base
    path = write(tmp_path / "a.safetensors", tensors, {"format": metadata["format"]})
    _, report = apply_adapter(load_model(folder), path, contract="preview-4")
    assert report.warnings == (
        "the metadata states no low_rank_tensors, diff_tensors, set_weight_tensors: whether the file is whole cannot "
        "be told",
    )


def test_a_missing_gate_is_named(base, tmp_path):
    _, folder, tensors, metadata, _ = base
    fewer = {n: t for n, t in tensors.items() if n != "transformer_blocks.1.attn.to_gate_compress.set_weight"}
    path = write(tmp_path / "a.safetensors", fewer, metadata | {"set_weight_tensors": "1"})
    with pytest.raises(CheckpointError, match=r"gates for 1 of 2 blocks; missing: blocks\.1\.attn\.to_gate_compress"):
        apply_adapter(load_model(folder), path)


def test_strength_zero_creates_no_gates(base):
    _, folder, _, _, path = base
    model = load_model(folder)
    assert apply_adapter(model, path, Settings(strength=0.0))[0] is model


def test_gates_over_gates_are_said(base, tmp_path):
    weights = tiny_tensors(gates=True)
    save(weights, tmp_path / "m", layout="diffusers", config=CONFIG)
    adapted, report = apply_adapter(load_model(tmp_path / "m", contract="v2-8"), base[4])
    assert "VSA gates already" in report.warnings[0]
    assert adapted.contract.name == "v2-8"  # by name, and against what the adapter says
    assert any("sparsity 0.8 instead of the recorded 0.9" in text for text in adapted.departures)


def test_truncated_adapter(base, tmp_path):
    data = base[4].read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        apply_adapter(load_model(base[1]), tmp_path / "cut.safetensors")


def test_progress_ends_at_the_total_and_an_interrupt_stops(base):
    adapted, _ = apply_adapter(load_model(base[1]), base[4])
    seen = []
    adapted.store.materialise("cpu", lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] and all(done <= total for done, total in seen)
    adapted.store.release()

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted.store.materialise("cpu", check_interrupt=stop)
    assert adapted.store.location is None


def test_the_file_of_an_adapter_that_changed_is_noticed(base, tmp_path):
    path = write(tmp_path / "a.safetensors", base[2], base[3])
    adapted, _ = apply_adapter(load_model(base[1]), path)
    save_file({name: t + 1 for name, t in base[2].items()}, path, metadata=base[3] | {"base_revision": "another"})
    with pytest.raises(CheckpointError, match="changed on disk"):
        adapted.store.materialise("cpu")
