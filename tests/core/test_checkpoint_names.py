"""Three layouts of one transformer: bitwise round trips, and one error for all that is wrong with a file."""

import re

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint import names
from comfyui_fasth3.fasth3_core.checkpoint.component import open_component
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight
from comfyui_fasth3.fasth3_core.checkpoint.rows import canonical_order, cut, stored_order
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from safetensors.torch import save_file

from .checkpoints import FORMS, assert_same, canonical, quantise, recorded


@pytest.mark.parametrize("layout", names.LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_round_trip(form, layout):
    tensors = canonical(form)
    stored = names.from_canonical(tensors, layout)
    if layout == "diffusers":
        del tensors["rope.inv_freq"]
    assert_same(names.to_canonical(stored, layout), tensors)


@pytest.mark.parametrize("layout", names.LAYOUTS)
@pytest.mark.parametrize("shards", [0, 1, 4])
def test_round_trip_through_files(tmp_path, layout, shards):
    tensors = canonical("gates")
    path = save(tensors, tmp_path / "transformer", layout=layout, shards=shards)
    component = open_component(path)
    assert len(component.files) == max(1, shards)
    plan = names.plan_transformer(component)  # the writer states the layout in the header
    assert plan.layout == layout
    if layout == "diffusers":
        del tensors["rope.inv_freq"]
    with component.open() as reader:
        assert_same({name: entry.load(reader) for name, entry in plan.entries.items()}, tensors)


@pytest.mark.parametrize("stem", ["dit_dense", "dit_bf16", "dit_rank", "dit_vsa", "dit_vsa_tile256"])
def test_recorded_diffusers_files(stem):
    stored = recorded(stem)
    assert_same(names.from_canonical(names.to_canonical(stored), "diffusers"), stored)


@pytest.mark.parametrize("stem", ["comfy_dense", "comfy_curve_adaln"])
def test_recorded_single_files_are_canonical(stem):
    stored = recorded(stem)
    assert_same(names.to_canonical(stored), stored)


def test_rows_by_their_definition():
    """Independent of the row engine: q, k, v and halves picked by hand from the formulas of each layout."""
    stored = recorded("dit_dense")
    fused = names.to_canonical(stored)
    name = "transformer_blocks.1."
    q, k, v = (stored[f"{name}attn.to_{part}.weight"] for part in "qkv")
    assert torch.equal(fused["blocks.1.attn.qkv_proj.weight"], torch.cat([q, k, v]))
    value, gate = stored[f"{name}ff.net.0.proj.weight"].chunk(2)
    assert torch.equal(fused["blocks.1.mlp.fc1.weight"], torch.cat([gate, value]))
    by_head = names.from_canonical(fused, "original")["blocks.1.attn.qkv_proj.weight"].view(2, 3, 128, 64)
    for part, rows in enumerate((q, k, v)):
        assert torch.equal(by_head[:, part].reshape(256, 64), rows)
    assert torch.equal(names.from_canonical(fused, "original")["blocks.1.mlp.fc1.weight"], torch.cat([gate, value]))


@pytest.mark.parametrize(("rule", "rows", "head_dim"), [("same", 7, 0), ("swap", 10, 0), ("heads", 3 * 5 * 4, 4)])
@pytest.mark.parametrize("members", [1, 3])
def test_row_orders_are_permutations(rule, rows, head_dim, members):
    rows *= members
    order = canonical_order(rule, rows, head_dim)
    forward = torch.cat([torch.arange(start, start + count) for start, count in order])
    back = torch.cat([torch.arange(start, start + count) for start, count in stored_order(order)])
    assert torch.equal(forward[back], torch.arange(rows)) and torch.equal(back[forward], torch.arange(rows))
    inputs = [f"in{i}" for i in range(members)]
    for outputs in (["a"], ["a", "b", "c"][: 3 if rows % 3 == 0 else 1]):
        pieces = cut(order, inputs, outputs, rows)
        flat = [
            inputs.index(p.source) * (rows // members) + p.start + i
            for out in outputs for p in pieces[out] for i in range(p.count)
        ]  # fmt: skip
        assert flat == forward.tolist()
        assert [sum(p.count for p in pieces[out]) for out in outputs] == [rows // len(outputs)] * len(outputs)


@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model.", "model.", "transformer."])
@pytest.mark.parametrize("layout", ["diffusers", "single-file"])
def test_prefixes(prefix, layout):
    tensors = canonical("gates")
    stored = names.from_canonical(tensors, layout)
    tensors = names.to_canonical(stored)
    assert_same(names.to_canonical({prefix + name: t for name, t in stored.items()}), tensors)


def test_fastvideo_runtime_names():
    stored = recorded("dit_vsa")
    spelled = {}
    for name, tensor in stored.items():
        for theirs, ours in (
            ("linear_1", "fc_in"), ("linear_2", "fc_out"), (".attn.to_out.0.", ".attn.to_out."),
            (".ff.net.0.proj.", ".ff.fc_in."), (".ff.net.2.", ".ff.fc_out."),
        ):  # fmt: skip
            name = name.replace(theirs, ours)
        spelled[name] = tensor
    assert spelled.keys() != stored.keys()
    assert_same(names.to_canonical(spelled), names.to_canonical(stored))


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("layout", names.LAYOUTS)
def test_quantised_rows_keep_their_scales(layout, group):
    tensors = canonical("gates")
    plain = {}
    for name in ("attn.qkv_proj", "mlp.fc1", "attn.to_gate_compress"):
        key = f"blocks.1.{name}.weight"
        tensors[key] = quantise(tensors[key], group)
        plain[key] = tensors[key].dequantise(torch.float32)
    stored = names.from_canonical(tensors, layout)
    again = names.to_canonical(stored, layout)
    tensors = {name: t for name, t in tensors.items() if name != "rope.inv_freq" or layout != "diffusers"}
    assert_same(again, tensors)
    # the rows of weight and scale went the same way as the rows of the float weight would
    expected = names.from_canonical({**tensors, **plain}, layout)
    for name, data in stored.items():
        if data.dtype == torch.int8:
            scale = stored[name.removesuffix("weight") + "weight_scale"]
            weight = QuantizedWeight(data, scale, "int8_tensorwise", group).dequantise(torch.float32)
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-7)


def test_layout_is_never_guessed(tmp_path):
    tensors = names.from_canonical(canonical("full"), "original")
    for folder in ("FL2VA/transformer", "elsewhere/transformer"):
        (tmp_path / folder).mkdir(parents=True)
        halves = sorted(tensors)[::2], sorted(tensors)[1::2]
        weight_map = {}
        for i, half in enumerate(halves):
            save_file({name: tensors[name].contiguous() for name in half}, tmp_path / folder / f"{i}.safetensors")
            weight_map |= dict.fromkeys(half, f"{i}.safetensors")
        (tmp_path / folder / "m.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}'.replace("'", '"'))
    official, elsewhere = (open_component(tmp_path / folder / "transformer") for folder in ("FL2VA", "elsewhere"))
    assert names.plan_transformer(official).layout == "original"
    with pytest.raises(CheckpointError, match="layout='original' or layout='single-file'"):
        names.plan_transformer(elsewhere)
    assert names.plan_transformer(elsewhere, "original").layout == "original"
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "one.safetensors")
    assert names.plan_transformer(open_component(tmp_path / "one.safetensors")).layout == "single-file"
    with pytest.raises(CheckpointError, match="has single-file or original names; layout 'diffusers'"):
        names.plan_transformer(official, "diffusers")
    with pytest.raises(CheckpointError, match="layout 'comfy'"):
        names.plan_transformer(official, "comfy")


def refused(tensors, layout="auto") -> str:
    with pytest.raises(CheckpointError) as error:
        names.to_canonical(tensors, layout)
    return str(error.value)


def test_missing_keys_are_grouped():
    tensors = canonical("full")
    for i in range(3):
        del tensors[f"blocks.{i}.attn.qkv_proj.weight"]
    said = refused(tensors)
    assert "blocks.*.attn.qkv_proj.weight: 3 missing (blocks.0.attn.qkv_proj.weight, ...)" in said
    assert said.count("missing") == 1  # nothing that depends on it is reported again


def test_missing_key_in_the_names_of_the_file():
    tensors = recorded("dit_dense")
    del tensors["transformer_blocks.2.attn.to_k.weight"]
    line = "transformer_blocks.*.attn.to_k.weight: 1 missing (transformer_blocks.2.attn.to_k.weight)"
    assert line in refused(tensors)


@pytest.mark.parametrize("gate", [0, 1, 2])
def test_a_missing_gate_is_named(gate):
    tensors = canonical("gates")
    del tensors[f"blocks.{gate}.attn.to_gate_compress.weight"]
    assert f"1 missing (blocks.{gate}.attn.to_gate_compress.weight)" in refused(tensors)


def test_a_missing_block_is_named():
    tensors = {name: t for name, t in canonical("full").items() if not name.startswith("blocks.1.")}
    assert len(re.findall(r"blocks\.\*\.\S+: 1 missing \(blocks\.1\.", refused(tensors))) == 10


def test_everything_wrong_is_said_at_once():
    tensors = recorded("dit_dense")
    tensors["strange.thing"] = torch.zeros(1)
    tensors["transformer_blocks.0.attn.to_q.bias"] = torch.zeros(256)
    del tensors["proj_in.bias"]
    tensors["transformer_blocks.1.attn.to_out.weight"] = tensors["transformer_blocks.1.attn.to_out.0.weight"]
    tensors["transformer_blocks.0.ff.net.2.weight"] = torch.zeros(64, 40)
    tensors["transformer_blocks.2.attn.to_v.weight"] = torch.zeros(255, 64)
    tensors["norm_out.linear.bias"] = torch.zeros(127)
    said = refused(tensors)
    for line in (
        "proj_in.bias: 1 missing",
        "strange.thing: 1 unknown",
        "transformer_blocks.*.attn.to_q.bias: 1 unknown",
        "transformer_blocks.*.attn.to_out.0.weight: 1 duplicate",
        "transformer_blocks.*.attn.to_out.weight: 1 duplicate",
        "transformer_blocks.0.ff.net.2.weight is [64, 40], expected [64, 48]",
        "transformer_blocks.2.attn.to_v.weight is [255, 64], expected [256, 64]",
        "norm_out.linear.bias is [127], expected [128]",
    ):
        assert line in said, f"{line}\n---\n{said}"
    assert "to_q.weight" not in said and "to_k.weight" not in said


def test_the_odd_one_out_is_blamed():
    tensors = canonical("gates")
    tensors["blocks.0.mlp.fc2.weight"] = torch.zeros(64, 50)
    tensors["final_layer.video_out.weight"] = torch.zeros(90, 64)
    said = refused(tensors)
    assert "blocks.0.mlp.fc2.weight is [64, 50], expected [64, 48]" in said
    assert "final_layer.video_out.weight is [90, 64], expected [96, 64]" in said
    assert said.count("expected") == 2


def test_a_head_bank_keeps_its_rows():
    tensors = canonical("full")
    for stream, width in (("video", 96), ("audio", 32)):
        tensors[f"final_layer.{stream}_out.weight"] = torch.randn(32 * width, 64)
        tensors[f"final_layer.{stream}_out.bias"] = torch.randn(32 * width)
    assert_same(names.to_canonical(tensors), tensors)


@pytest.mark.parametrize(
    ("stem", "said"),
    [("video_vae", "this is the MiniMax-H3 video VAE.*FastH3 Load VAE, as video_vae"),
     ("audio_vae", "this is the MiniMax-H3 audio VAE.*FastH3 Load VAE, as audio_vae")],
)  # fmt: skip
def test_a_vae_in_the_model_slot(stem, said):
    assert re.search(said, refused(recorded(stem)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"], "this is a text encoder.*CLIPLoader"),
        (["transformer_blocks.0.attn.to_q.lora_A.weight"], "this is an adapter"),
        (["transformer_blocks.0.attn.to_gate_compress.set_weight"], "this is an adapter"),
        (["text_states", "token_tags"], "prompt embeddings.*FastH3 Load Prompt Embeds"),
        (["blocks.0.self_attn.q.weight"], r"none of its 1 tensors is known \(e.g. blocks.0.self_attn.q.weight\)"),
    ],
)
def test_other_files_in_the_model_slot(keys, said):
    assert re.search(said, refused({key: torch.zeros(2, 2) for key in keys}))


@pytest.mark.parametrize("number", ["999999999999", "9" * 5000, "00", "٣"])
def test_a_number_that_is_no_block_is_an_unknown_name(number):
    tensors = canonical("full")
    name = f"blocks.{number}.norm1.weight"
    with pytest.raises(CheckpointError, match=r"norm1\.weight: 1 unknown"):
        names.to_canonical(tensors | {name: tensors["blocks.0.norm1.weight"]})
