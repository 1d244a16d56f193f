"""`inspect`: the facts of every component, in words and as JSON, and a plain error for a file that is none."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from comfyui_fasth3.cli import main
from comfyui_fasth3.fasth3_core.checkpoint import audio_names, names, vae_names
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def recorded(stem: str) -> dict[str, torch.Tensor]:
    tensors = load_file(GOLDEN / f"{stem}.safetensors")
    return {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    save(names.to_canonical(recorded("dit_vsa")), root / "transformer", layout="diffusers", shards=2)
    save(vae_names.to_canonical(recorded("video_vae")), root / "vae", layout="diffusers")
    save(audio_names.to_canonical(recorded("audio_vae")), root / "audio_vae", layout="diffusers")
    return root


def facts(capsys, *arguments) -> list[dict]:
    assert main(["inspect", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_repository_as_json(repository, capsys):
    model, video, audio = facts(capsys, repository)
    assert model["component"] == "transformer" and model["layout"] == "diffusers" and model["files"] == 2
    assert model["tensors"] == 77 and model["dtypes"] == {"F16": 77}
    assert model["dimensions"]["num_layers"] == 3 and model["dimensions"]["adaln"] == "full"
    assert model["gates"] == "trained" and model["quantisation"] == {}
    assert model["contract"]["auto"] is None and {"preview-4", "v2-8"} <= set(model["contract"]["candidates"])
    assert model["bytes"] == sum(file.stat().st_size for file in (repository / "transformer").glob("*.safetensors"))
    assert video["component"] == "video VAE" and video["decoder_blocks"] == 2 and video["encoder"]
    assert audio["component"] == "audio VAE" and audio["layout"] == "diffusers"


def test_words(repository, capsys):
    assert main(["inspect", str(repository)]) == 0
    said = capsys.readouterr().out
    for line in ("3 and 2 for the text", "64, 2 heads x 128", "trained", "preview-4, v2-8", "2 blocks, width 128"):
        assert line in said


def test_quantised_and_rank_and_curve(tmp_path, capsys):
    tensors = names.to_canonical(recorded("comfy_curve_adaln"))
    for i in range(3):
        name = f"blocks.{i}.mlp.fc1.weight"
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        int8 = names.QuantizedWeight((tensors[name] / scale).round().to(torch.int8), scale, "int8_tensorwise")
        tensors[name] = int8
    curve = save(tensors, tmp_path / "curve.safetensors", {"made_by": "a test"})
    rank = save(names.to_canonical(recorded("dit_rank")), tmp_path / "rank.safetensors")
    one, two = facts(capsys, curve, rank)
    assert one["dimensions"]["adaln"] == "curve" and one["quantisation"] == {"blocks.*.mlp.fc1": {"int8_tensorwise": 3}}
    assert one["metadata"]["made_by"] == "a test" and one["gates"] == "none" and one["contract"]["auto"] == "base"
    assert two["dimensions"]["adaln_rank"] == 8 and two["dtypes"].keys() == {"F32", "BF16", "F16"}
    assert main(["inspect", str(curve), str(rank)]) == 0
    assert "3 layers int8_tensorwise (blocks.*.mlp.fc1)" in capsys.readouterr().out


def test_other_files_are_named(tmp_path, capsys):
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, tmp_path / "text.safetensors")
    save_file({"x.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "lora.safetensors")
    save_file({"x": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    text, lora, strange = facts(capsys, *(tmp_path / f"{stem}.safetensors" for stem in ("text", "lora", "x")))
    assert text["component"] == "text encoder" and "CLIPLoader" in text["note"]
    assert lora["component"] == "adapter" and strange["component"] == "unknown"


def test_a_bad_file_does_not_hide_the_others(tmp_path, repository, capsys):
    (tmp_path / "empty.safetensors").touch()
    assert main(["inspect", str(tmp_path / "empty.safetensors"), str(repository / "vae")]) == 1
    said = capsys.readouterr()
    assert "empty (0 bytes)" in said.err and "video VAE" in said.out
    assert main(["inspect", "--json", str(tmp_path / "empty.safetensors"), str(repository / "vae")]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert "empty (0 bytes)" in first["error"] and second["component"] == "video VAE"


def test_adapters(tmp_path, capsys):
    from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter
    from comfyui_fasth3.fasth3_core.selftest.random_weights import random_transformer

    base = random_transformer(
        num_layers=2, hidden_size=64, num_heads=2, head_dim=32, ffn_dim=48, text_dim=20, freq_dim=32,
        time_embed_hidden_dim=64, time_embed_dim=512, rope_freq_dim=4, gates=False,
    )  # fmt: skip
    tensors, metadata = random_adapter(base)
    save_file(tensors, tmp_path / "vsa.safetensors", metadata=metadata)
    parts = {"lora_down.weight": (8, 48), "lora_up.weight": (64, 8), "alpha": ()}
    style = {f"lora_unet_blocks_{i}_mlp_fc2.{part}": torch.zeros(parts[part]) for i in range(2) for part in parts}
    save_file(style | {"lora_te1_x.lora_down.weight": torch.zeros(1, 1)}, tmp_path / "style.safetensors")
    assert main(["inspect", str(tmp_path / "vsa.safetensors"), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    found = facts["adapter"]
    assert found["format"] == "fastvideo-lora-v2" and found["ranks"] == {"4": 26} and found["gates"] == 2
    assert found["contract"] == "preview-4" and found["scale"] == "1 from the format's 1 (26 pairs)"
    assert found["naming"].keys() == {"diffusers"}
    assert found["layers"]["blocks.*.attn.qkv_proj"] == 6 and found["tensors"]["set_weight"] == 2
    for said in ("made for MiniMaxAI/MiniMax-H3", "changes 2 blocks", "width 64", "AdaLN of 512 inputs: the full form",
                 "VSA gates for 2 blocks"):  # fmt: skip
        assert said in found["fits"]
    assert main(["inspect", str(tmp_path / "style.safetensors")]) == 0
    text = capsys.readouterr().out
    for said in ("LoRA", "2 pairs of rank 8; 2 alpha", "0 from the layer's alpha (2 pairs)", "2 x blocks.*.mlp.fc2",
                 "lora_te1_x.lora_down.weight: 1 of no layer", "it names none"):  # fmt: skip
        assert said in text
    save_file({"x.lora_A.weight": torch.zeros(1, 1), "x.dora_scale": torch.zeros(1)}, tmp_path / "dora.safetensors")
    assert main(["inspect", str(tmp_path / "dora.safetensors")]) == 1
    assert "DoRA" in capsys.readouterr().err


def test_one_shard_is_told_the_folder_to_name(tmp_path, capsys):
    tensors = names.to_canonical(recorded("dit_vsa"))
    save(tensors, tmp_path / "transformer", layout="diffusers", shards=2)
    shard = next((tmp_path / "transformer").glob("*-00001-of-00002.safetensors"))
    assert main(["inspect", str(shard)]) == 1
    said = capsys.readouterr().err
    assert "one of the 2 shards of a model" in said and f"Name their folder, {tmp_path / 'transformer'}" in said
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    assert main(["inspect", str(shard)]) == 1
    assert "their index (*.safetensors.index.json) is not beside it" in capsys.readouterr().err


def test_checksums_on_request(repository, capsys):
    found = facts(capsys, "--checksum", repository)
    for model in found:
        for name, digest in model["sha256"].items():
            assert hashlib.sha256((Path(model["path"]) / name).read_bytes()).hexdigest() == digest
    assert sum(len(model["sha256"]) for model in found) == 4
    assert main(["inspect", "--checksum", str(repository / "vae")]) == 0
    assert "sha256" in capsys.readouterr().out
