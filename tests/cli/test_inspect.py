"""`inspect`: the facts of every component, in words and as JSON, and a plain error for a file that is none."""

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
