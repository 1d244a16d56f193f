"""Mirrors nodes/_prompt_file.py, _graph.py and the two prompt nodes of nodes/conditioning.py."""

import hashlib
import json

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError
from comfyui_fasth3.fasth3_core.packing.layout import Keyframe, Reference
from comfyui_fasth3.nodes import _conditioning, _graph, _prompt_file
from comfyui_fasth3.nodes._conditioning import Prompt
from comfyui_fasth3.nodes._host import io
from safetensors.torch import load_file, save_file

STATES = torch.randn(1, 5, 16).bfloat16()
TAGS = torch.tensor([1, 0, 0, 1, 1])
PROMPT = Prompt(STATES, TAGS, (
    Keyframe(0, torch.randn(1, 24, 1, 4, 4)), Keyframe(21, None, torch.randn(1, 32, 2, 8)),
    Keyframe(4, torch.randn(1, 24, 2, 4, 4), torch.randn(1, 32, 2, 8)),
))  # fmt: skip


def same(a: Prompt, b: Prompt) -> bool:
    pairs = [(a.text_states, b.text_states), (a.token_tags, b.token_tags)]
    pairs += [pair for k, l in zip(a.keyframes, b.keyframes, strict=True)
              for pair in ((k.latent, l.latent), (k.audio_latent, l.audio_latent))]
    equal = all(x is y if x is None else torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)
    return equal and [k.frame for k in a.keyframes] == [l.frame for l in b.keyframes]


@pytest.mark.parametrize("name", ["plain", "Füchsin 狐 – é", "with space"])
def test_round_trip_is_exact(tmp_path, name):
    path = tmp_path / f"{name}.safetensors"
    _prompt_file.save(path, PROMPT, {"prompt": "eine Füchsin 狐", "encoder": "te.safetensors"})
    loaded, metadata = _prompt_file.load(path)
    assert same(loaded, PROMPT)
    assert metadata["prompt"] == "eine Füchsin 狐"
    assert metadata["format"] == "fasth3-prompt-1"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_names_in_the_file(tmp_path):
    _prompt_file.save(tmp_path / "a.safetensors", PROMPT, {})
    assert set(load_file(tmp_path / "a.safetensors")) == {
        "text_states", "token_tags", "keyframe0", "keyframe1_audio", "keyframe2", "keyframe2_audio"
    }


def test_references_are_kept_in_a_form_of_their_own(run, tmp_path):
    """Versions that would leave them out refuse the file."""
    picture, tone = torch.randn(1, 24, 1, 4, 6), torch.randn(1, 32, 2, 8)
    references = (Reference("image", picture), Reference("video_audio", picture.expand(1, 24, 2, 4, 6), tone),
                  Reference("audio", None, tone))
    prompt = Prompt(STATES, TAGS, PROMPT.keyframes, references)
    text = run("FastH3SavePromptEmbeds", positive=_conditioning.write(prompt), filename_prefix="p").ui["text"][0]
    assert text.endswith(": 5 tokens, 3 keyframes, 3 references")
    loaded = _conditioning.read(run("FastH3LoadPromptEmbeds", file="p_00001_.safetensors [output]").args[0])
    assert same(loaded, prompt) and [r.kind for r in loaded.references] == ["image", "video_audio", "audio"]
    for actual, expected in zip(loaded.references, references, strict=True):
        for a, b in ((actual.latent, expected.latent), (actual.audio_latent, expected.audio_latent)):
            assert a is b is None or torch.equal(a, b)
    _prompt_file.save(tmp_path / "a.safetensors", prompt, {})
    assert _prompt_file.load(tmp_path / "a.safetensors")[1]["format"] == "fasth3-prompt-2"


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def broken(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(_prompt_file, "save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        _prompt_file.save(tmp_path / "a.safetensors", PROMPT, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [4, 40, -10])
def test_truncated_file(tmp_path, cut):
    path = tmp_path / "a.safetensors"
    _prompt_file.save(path, PROMPT, {})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read"):
        _prompt_file.load(path)


def test_another_safetensors_file(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"no prompt file \(no format instead of fasth3-prompt-1\)"):
        _prompt_file.load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, {}),
        ({}, {"keyframe_frames": "["}),
        ({}, {"keyframe_frames": "5"}),
        ({}, {"keyframe_frames": "[]", "reference_kinds": "nope"}),
        ({"reference0": torch.zeros(24, 1, 4, 4)}, {"keyframe_frames": "[]", "reference_kinds": '["image"]'}),
    ],
    ids=["no-list", "cut", "number", "no-json", "shape"],
)
def test_a_damaged_list_of_conditions(tmp_path, tensors, metadata):
    path = tmp_path / "a.safetensors"
    save_file({"text_states": STATES, "token_tags": TAGS, **tensors}, path,
              metadata={"format": _prompt_file.FORMAT_WITH_REFERENCES, **metadata})
    with pytest.raises(CheckpointError, match=r"a\.safetensors: its list of conditions is damaged"):
        _prompt_file.load(path)


GRAPH = {
    "1": {"class_type": "CLIPLoader", "inputs": {"clip_name": "te.safetensors", "type": "minimax"}},
    "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 0], "text": "a fox"}},
    "3": {"class_type": "FastH3SavePromptEmbeds", "inputs": {"positive": ["2", 0], "filename_prefix": "p"}},
    "4": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 0], "text": "not upstream"}},
}


def test_facts_come_from_upstream_alone(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "te.safetensors", metadata={"format": "pt"})
    facts = _graph.prompt_facts(GRAPH, "3", [tmp_path])
    stored = (tmp_path / "te.safetensors").read_bytes()
    header = stored[: 8 + int.from_bytes(stored[:8], "little")]
    assert facts == {"prompt": "a fox", "encoder": "te.safetensors", "encoder_hash": hashlib.sha256(header).hexdigest()}


def test_facts_without_a_file_a_graph_or_an_id(tmp_path):
    assert _graph.prompt_facts(GRAPH, "3", [tmp_path]) == {"prompt": "a fox", "encoder": "te.safetensors"}
    assert _graph.prompt_facts(None, "3", []) == {}
    assert _graph.prompt_facts(GRAPH, None, []) == {}


def test_facts_survive_a_cycle():
    loop = {"1": {"inputs": {"a": ["2", 0]}}, "2": {"inputs": {"a": ["1", 0], "prompt": "x"}}}
    assert _graph.prompt_facts(loop, "1", []) == {"prompt": "x"}


def test_save_node_and_load_node(run, folders):
    given = _conditioning.write(PROMPT)
    hidden = {io.Hidden.prompt: GRAPH, io.Hidden.unique_id: "3"}
    ui = run("FastH3SavePromptEmbeds", hidden, positive=given, filename_prefix="sub/my prompt").ui
    assert ui["text"][0] == "my prompt_00001_.safetensors: 5 tokens, 3 keyframes"
    assert ui["prompts"] == [{"filename": "my prompt_00001_.safetensors", "subfolder": "sub", "type": "output"}]
    output = run("FastH3LoadPromptEmbeds", file="sub/my prompt_00001_.safetensors [output]")
    assert same(_conditioning.read(output.args[0]), PROMPT)
    assert output.ui["text"] == ("a fox",)


def test_load_node_offers_both_folders(run, host, folders, bundle):
    run("FastH3SavePromptEmbeds", positive=_conditioning.write(PROMPT), filename_prefix="p")
    from comfyui_fasth3.nodes import FastH3LoadPromptEmbeds

    options = FastH3LoadPromptEmbeds.GET_SCHEMA().inputs[0].options
    assert options == [bundle.names.prompt, "p_00001_.safetensors [output]"]


@pytest.mark.parametrize("file, message", [
    ("gone.safetensors", "does not exist"), ("../gone.safetensors", "inside the input or output folder"),
    ("../../x [output]", "inside the input or output folder"),
])  # fmt: skip
def test_load_node_refuses(run, file, message):
    with pytest.raises(CheckpointError, match=message):
        run("FastH3LoadPromptEmbeds", file=file)


def test_save_node_stays_in_the_output_folder(run):
    with pytest.raises(ConfigError, match="inside the output folder"):
        run("FastH3SavePromptEmbeds", positive=_conditioning.write(PROMPT), filename_prefix="../p")


def test_fingerprint_changes_with_the_file(run, folders, bundle):
    from comfyui_fasth3.nodes import FastH3LoadPromptEmbeds

    before = FastH3LoadPromptEmbeds.fingerprint_inputs(bundle.names.prompt)
    _prompt_file.save(folders / "input" / bundle.names.prompt, PROMPT, {"note": json.dumps([1])})
    assert FastH3LoadPromptEmbeds.fingerprint_inputs(bundle.names.prompt) != before
