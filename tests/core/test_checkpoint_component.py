"""Files, folders, indices and repository roots, and what is said when they do not hold together."""

import json

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint.component import in_official_tree, open_component
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def shards(folder, files, weight_map=None):
    """`files`: file name -> tensor names."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        save_file({name: torch.full((2,), float(i)) for i, name in enumerate(names)}, folder / file)
    weight_map = weight_map or {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_by_folder_index_and_root(tmp_path):
    folder = shards(tmp_path / "transformer", {"a.safetensors": ["x", "y"], "b.safetensors": ["z"]})
    (folder / "config.json").write_text('{"num_layers": 3}')
    for path in (folder, folder / INDEX, tmp_path):
        component = open_component(path, ("transformer", "transformer_ref"))
        assert set(component.tensors) == {"x", "y", "z"} and component.config == {"num_layers": 3}
        assert component.read("y").tolist() == [1.0, 1.0]


def test_folder_with_one_file(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert open_component(tmp_path).config == {}
    assert open_component(tmp_path / "model.safetensors").config == {}


def test_configuration_of_a_folder_of_models_is_nobodys(tmp_path):
    for name in "ab":
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert open_component(tmp_path / "a.safetensors").config is None
    with pytest.raises(CheckpointError, match=r"holds a\.safetensors, b\.safetensors; expected one weight file"):
        open_component(tmp_path)


def test_two_transformers_are_asked_for_by_name(tmp_path):
    for name in ("transformer", "transformer_ref"):
        shards(tmp_path / name, {"a.safetensors": [name]})
    with pytest.raises(CheckpointError, match=r"several models.*transformer or .*transformer_ref"):
        open_component(tmp_path, ("transformer", "transformer_ref"))
    assert set(open_component(tmp_path / "transformer_ref").tensors) == {"transformer_ref"}


def test_official_root_asks_for_the_partition(tmp_path):
    shards(tmp_path / "FL2VA" / "transformer", {"a.safetensors": ["x"]})
    with pytest.raises(CheckpointError, match=r"Name the partition to load: .*FL2VA"):
        open_component(tmp_path, ("transformer",))
    assert in_official_tree(open_component(tmp_path / "FL2VA", ("transformer",)))


def test_official_tree_under_another_name(tmp_path):
    component = open_component(shards(tmp_path / "h3" / "transformer", {"a.safetensors": ["x"]}))
    assert not in_official_tree(component)
    (tmp_path / "h3" / "model_index.json").write_text('{"minimax_h3": {"partition": "Ref2VA", "tasks": ["ref2va"]}}')
    assert in_official_tree(component)


def test_missing_shards_are_named(tmp_path):
    index = {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}
    folder = shards(tmp_path, {"a.safetensors": ["x"]}, index)
    with pytest.raises(CheckpointError, match=r"2 of 3 shards are missing: b\.safetensors, c\.safetensors"):
        open_component(folder)


def test_index_and_shards_disagree(tmp_path):
    files = {"a.safetensors": ["x", "twice", "extra"], "b.safetensors": ["twice"]}
    weight_map = {"x": "b.safetensors", "twice": "a.safetensors", "gone": "a.safetensors"}
    with pytest.raises(CheckpointError) as error:
        open_component(shards(tmp_path, files, weight_map))
    for said in (
        "1 in more than one shard (e.g. 'twice')",
        "2 in the index but not in its shard (e.g. 'x')",
        "1 in a shard but not in the index (e.g. 'extra')",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize("target", ["../a.safetensors", "/etc/passwd"])
def test_index_may_not_leave_its_folder(tmp_path, target):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": target}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_component(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"metadata": {}}', '{"weight_map": {"x": 3}}'])
def test_index_that_is_none(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        open_component(tmp_path)


def test_nothing_to_load(tmp_path):
    with pytest.raises(CheckpointError, match="it holds nothing"):
        open_component(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"no safetensors weights; it holds pytorch_model\.bin"):
        open_component(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent\.safetensors does not exist"):
        open_component(tmp_path / "absent.safetensors")


def test_a_damaged_index_of_others_hides_no_file(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": {}}}'):
        (tmp_path / "other.safetensors.index.json").write_text(text)
        assert open_component(tmp_path / "model.safetensors").files
