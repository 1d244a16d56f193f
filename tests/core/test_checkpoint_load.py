"""From a path to a handle: contract, configuration, layout, and one store for the same files."""

import gc
import json

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint.component import open_component
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, ContractError

from .checkpoints import canonical, quantise

RECORD = {
    "schema_version": "fasth3-inference-contract-v1", "task": "t2av",
    "dmd_denoising_steps": [999, 874, 749, 624, 500, 375, 250, 125], "num_inference_steps": 9,
    "vsa_sparsity": 0.8, "vsa_tile_size": 64, "video_scheduler_shift": 10.0, "audio_scheduler_shift": 3.0,
    "attention_backend": "VIDEO_SPARSE_ATTN_H3", "guidance_scale": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("form", ["full", "rank", "curve"])
def test_dense_forms(tmp_path, form):
    model = load_model(save(canonical(form), tmp_path / "model.safetensors"))
    assert model.config.adaln == form and not model.config.has_gates
    assert model.contract.name == "base" and model.details["layout"] == "single-file"
    assert model.source == str(tmp_path / "model.safetensors")


def test_gated_file_asks_for_its_contract(tmp_path):
    path = save(canonical("gates"), tmp_path / "model.safetensors")
    with pytest.raises(ContractError, match=r"'preview-4'.*'v2-8'"):
        load_model(path)
    assert load_model(path, contract="v2-8").contract.name == "v2-8"
    with pytest.raises(ContractError, match="attends densely"):
        load_model(path, contract="base")


def test_gates_of_zero_are_the_compact_student(tmp_path):
    tensors = {name: t * 0 if "gate_compress" in name else t for name, t in canonical("gates").items()}
    assert load_model(save(tensors, tmp_path / "model.safetensors")).contract.name == "compact"


@pytest.mark.parametrize("place", [".", "transformer"])
def test_recorded_contract(tmp_path, place):
    save(canonical("gates"), tmp_path / "transformer", layout="diffusers", shards=2)
    (tmp_path / place / "fastvideo_inference.json").write_text(json.dumps(RECORD))
    model = load_model(tmp_path)
    assert model.contract.name == "v2-8" and model.contract.sparsity == 0.8 and model.details["recorded_contract"]


def test_a_contract_against_the_record_is_a_departure(tmp_path):
    path = save(canonical("gates"), tmp_path / "a.safetensors")
    record = tmp_path / "fastvideo_inference.json"
    record.write_text(json.dumps(RECORD))
    assert load_model(path).departures == load_model(path, contract="v2-8").departures == ()
    against = load_model(path, contract="preview-4").departures
    assert {"points 5 instead of the recorded 9", "shift_video 12.0 instead of the recorded 10.0"} <= set(against)
    record.write_text(json.dumps(RECORD | {"vsa_sparsity": "most"}))
    departure = load_model(path, contract="preview-4").departures[0]
    assert "fastvideo_inference.json says vsa_sparsity='most'" in departure


def test_a_record_belongs_to_a_file_only_where_it_is_alone(tmp_path):
    path = save(canonical("gates"), tmp_path / "a.safetensors")
    (tmp_path / "fastvideo_inference.json").write_text(json.dumps(RECORD))
    assert load_model(path).contract.name == "v2-8"
    save(canonical("full"), tmp_path / "b.safetensors")
    with pytest.raises(ContractError):
        load_model(path)


@pytest.mark.parametrize(("layout", "form"), [("diffusers", "absolute"), ("single-file", "residual")])
def test_head_bank(tmp_path, layout, form):
    tensors = canonical("gates")
    for stream, width in (("video", 96), ("audio", 32)):
        tensors[f"final_layer.{stream}_out.weight"] = torch.randn(32 * width, 64)
        tensors[f"final_layer.{stream}_out.bias"] = torch.randn(32 * width)
    model = load_model(save(tensors, tmp_path / "model.safetensors", layout=layout))
    assert model.contract.name == "omniref-8" and model.config.output_heads == 32
    assert model.store.head_form == form


def test_configuration_must_agree(tmp_path):
    path = save(canonical("full"), tmp_path / "transformer", layout="diffusers", config={"num_layers": 3})
    assert load_model(path).config.num_layers == 3
    save(canonical("full"), path, layout="diffusers", config={"num_layers": 4})
    with pytest.raises(CheckpointError, match="says num_layers=4, the tensors say 3"):
        load_model(path)


def test_rotary_width_comes_from_the_configuration(tmp_path):
    path = save(canonical("full"), tmp_path / "transformer", layout="diffusers", config={"rope_freq_dim": 8})
    assert load_model(path).config.rope_freq_dim == 8


def test_same_files_same_store(tmp_path):
    path = save(canonical("full"), tmp_path / "model.safetensors")
    first, second = load_model(path), load_model(str(path))
    assert first.store is second.store
    assert load_model(path, dtype="bf16").store is not first.store
    save(canonical("full") | {"condition_proj.bias": torch.zeros(64)}, path)
    assert load_model(path).store is not first.store  # another file under the same name


def test_store_goes_with_its_last_holder(tmp_path):
    path = save(canonical("full"), tmp_path / "model.safetensors")
    model = load_model(path)
    model.store.materialise("cpu")
    del model
    gc.collect()
    assert load_model(path).store.location is None


def test_unknown_settings(tmp_path):
    path = save(canonical("full"), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="dtype='int4'"):
        load_model(path, dtype="int4")
    with pytest.raises(ConfigError, match="contract='v9'"):
        load_model(path, contract="v9")


def test_official_tree(tmp_path):
    tensors = canonical("full")
    path = save(tensors, tmp_path / "FL2VA" / "transformer", {"fasth3.layout": ""}, layout="original", shards=13)
    assert len(open_component(path).files) == 13
    model = load_model(tmp_path / "FL2VA")
    assert model.details["layout"] == "original"
    model.store.materialise("cpu")
    qkv = model.store.block(1)["attn.qkv_proj.weight"]
    assert torch.equal(qkv, tensors["blocks.1.attn.qkv_proj.weight"].float())


def test_quantised_model(tmp_path):
    tensors = canonical("gates")
    for name in list(tensors):
        if name.endswith(("qkv_proj.weight", "fc2.weight", "gate_compress.weight")):
            tensors[name] = quantise(tensors[name], 16)
    model = load_model(save(tensors, tmp_path / "model.safetensors", layout="diffusers"), contract="preview-4")
    assert model.details["quantised_layers"] == 5 + 5 + 3
    model.store.materialise("cpu")
    weight = model.store.block(2)["attn.qkv_proj.weight"]
    assert weight.format == "int8_tensorwise" and weight.group == 16
    assert torch.equal(weight.data, tensors["blocks.2.attn.qkv_proj.weight"].data)


def test_shards_need_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="2 shards need a folder"):
        save(canonical("full"), tmp_path / "model.safetensors", shards=2)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path = save(canonical("full"), tmp_path / "model.safetensors")
    before = path.read_bytes()

    def fail(tensors, to, metadata):
        to.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("comfyui_fasth3.fasth3_core.checkpoint.save.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save(canonical("gates"), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_only_components_are_written(tmp_path):
    with pytest.raises(CheckpointError, match="nothing is written"):
        save({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())
