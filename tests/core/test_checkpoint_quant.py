"""Quantised weights: recorded values, every marker form, and a name for what is not read."""

import json

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint import names
from comfyui_fasth3.fasth3_core.checkpoint.component import open_component
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight, Spec
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from safetensors.torch import load_file, save_file

from .checkpoints import assert_same, canonical, quantise

LAYER = "blocks.1.mlp.fc1"
ATOL = 1e-6  # recorded weights are below 1: a few roundings of fp32


@pytest.mark.parametrize("case", range(3))
def test_recorded_weights(golden_dir, case):
    data = load_file(golden_dir / "int8_linear.safetensors")
    fields = json.loads(bytes(data[f"{case}.comfy_quant"].tolist()))
    group = fields["convrot_groupsize"] if fields["convrot"] else None
    weight = QuantizedWeight(data[f"{case}.weight"], data[f"{case}.weight_scale"], fields["format"], group)
    expected = data[f"{case}.dequantized"]
    torch.testing.assert_close(weight.dequantise(torch.float32), expected, rtol=0, atol=ATOL)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(weight.dequantise(torch.float32) * 1.01, expected, rtol=0, atol=ATOL)
    assert json.loads(bytes(weight.spec.marker().tolist())) == fields


def stored_with(weight: QuantizedWeight, marker: bool = True) -> dict[str, torch.Tensor]:
    stored = names.from_canonical(canonical("gates") | {f"{LAYER}.weight": weight}, "single-file")
    if not marker:
        del stored[f"{LAYER}.comfy_quant"]
    return stored


def fp8(weight: torch.Tensor, scale: torch.Tensor, dtype=torch.float8_e4m3fn) -> QuantizedWeight:
    return QuantizedWeight((weight.float() / scale).to(dtype), scale, Spec(str(dtype)[6:]).format)


@pytest.mark.parametrize("one", [(), (1,), (1, 1), None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("layout", names.LAYOUTS)
def test_float8(layout, dtype, one):
    """With a scale a row, or one number for the whole weight, as most files have it, in any of its shapes."""
    plain = canonical("gates")
    weight = plain[f"{LAYER}.weight"].float()
    scale = weight.abs().amax(1, keepdim=True) / 400
    scale = scale if one is None else scale.amax().expand_as(scale).clone()
    tensors = plain | {f"{LAYER}.weight": fp8(weight, scale, dtype)}
    stored = names.from_canonical(tensors, layout)
    if one is not None:
        name = next(name for name in stored if name.endswith("weight_scale"))
        stored[name] = scale[0, 0].reshape(one)
    again = names.to_canonical(stored, layout)
    assert_same({f"{LAYER}.weight": again[f"{LAYER}.weight"]}, {f"{LAYER}.weight": tensors[f"{LAYER}.weight"]})
    error = (again[f"{LAYER}.weight"].dequantise(torch.float32) - weight).abs().max()
    assert 0 < error < 0.13 * weight.abs().max()


def test_q_k_and_v_with_a_scale_each():
    plain = canonical("full")
    q, k, v = plain["blocks.0.attn.qkv_proj.weight"].float().chunk(3)
    stored = names.from_canonical(plain, "diffusers")
    for part, weight in zip("qkv", (q, k, v), strict=True):
        scale = weight.abs().amax() / 448 * (1 + "qkv".index(part))
        stored[f"transformer_blocks.0.attn.to_{part}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        stored[f"transformer_blocks.0.attn.to_{part}.weight_scale"] = scale
    fused = names.to_canonical(stored)["blocks.0.attn.qkv_proj.weight"]
    assert fused.scale.shape == (768, 1) and len(fused.scale.unique()) == 3
    expected = [
        stored[f"transformer_blocks.0.attn.to_{part}.weight"].float()
        * stored[f"transformer_blocks.0.attn.to_{part}.weight_scale"]
        for part in "qkv"
    ]
    assert torch.equal(fused.dequantise(torch.float32), torch.cat(expected))
    del stored["transformer_blocks.0.attn.to_k.weight_scale"]
    with pytest.raises(CheckpointError, match="q, k and v are not quantised alike"):
        names.to_canonical(stored)


def test_older_spellings_of_fp8_scales():
    weight = canonical("gates")[f"{LAYER}.weight"].float()
    tensors = canonical("gates") | {f"{LAYER}.weight": fp8(weight, weight.abs().amax(1, keepdim=True) / 400)}
    stored = names.from_canonical(tensors, "single-file")
    del stored[f"{LAYER}.comfy_quant"]
    stored[f"{LAYER}.scale_weight"] = stored.pop(f"{LAYER}.weight_scale")
    stored |= {f"{LAYER}.scale_input": torch.ones(()), "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    assert_same(names.to_canonical(stored), tensors)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_header_metadata_in_place_of_markers(tmp_path, prefix):
    weight = quantise(canonical("gates")[f"{LAYER}.weight"], 16)
    stored = {prefix + name: t.contiguous().clone() for name, t in stored_with(weight, marker=False).items()}
    fields = {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 16}}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {prefix + LAYER: fields}})}
    save_file(stored, tmp_path / "a.safetensors", metadata=metadata)
    component = open_component(tmp_path / "a.safetensors")
    plan = names.plan_transformer(component)
    assert plan.quantised == {LAYER: weight.spec}
    with component.open() as reader:
        loaded = plan.entries[f"{LAYER}.weight"].load(reader, torch.bfloat16)
    assert_same({LAYER: loaded}, {LAYER: weight})  # a dtype of the run leaves it quantised


def refused(stored) -> str:
    with pytest.raises(CheckpointError) as error:
        names.to_canonical(stored)
    return str(error.value)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "convrot_w4a4", "asym_w4a8_int8"])
def test_unread_formats_are_named(fmt):
    stored = stored_with(quantise(canonical("gates")[f"{LAYER}.weight"]))
    stored[f"{LAYER}.comfy_quant"] = torch.tensor(list(json.dumps({"format": fmt}).encode()), dtype=torch.uint8)
    said = refused(stored)
    assert f"1 layers '{fmt}'" in said and "int8_tensorwise" in said and "use the bf16" in said


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"weight": torch.zeros(96, 32, dtype=torch.uint8), "weight_scale_2": torch.ones(())}, "NVFP4"),
        ({"qweight": torch.zeros(8, 8, dtype=torch.int32), "qzeros": torch.zeros(2, 2)}, "AWQ or GPTQ"),
        ({"weight": torch.zeros(96, 64, dtype=torch.int8)}, "int8 without a marker"),
        ({"weight": torch.zeros(96, 32, dtype=torch.uint8)}, "packed as U8"),
        ({"weight": torch.zeros(96, 32, dtype=torch.uint8), "weight.absmax": torch.zeros(9)}, "bitsandbytes"),
    ],
)
def test_unmarked_formats_are_named(extra, said):
    stored = canonical("gates")
    del stored[f"{LAYER}.weight"]
    assert said in refused(stored | {f"{LAYER}.{part}": t for part, t in extra.items()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_scale": None}, "is marked as int8_tensorwise convrot 16 but has no weight_scale"),
        ({"weight": None}, "but has no weight"),
        ({"weight_scale": torch.ones(5)}, r"weight_scale is F32 \[5\]"),
        ({"weight": torch.zeros(96, 64)}, r"its weight is F32 \[96, 64\], expected I8"),
        ({"comfy_quant": b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'}, "groups of 256"),
        ({"comfy_quant": b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 32}'}, "groups of 32"),
        ({"comfy_quant": b'{"format": "int8_tensorwise", "twisted": 1}'}, r"unknown settings \['twisted'\]"),
        ({"comfy_quant": b'{"format": "int8_tensorwise", "params": {"g": 3}}'}, r"unknown settings \['g'\]"),
        ({"comfy_quant": b'{"format": "int8_tensorwise", "params": 5}'}, r"unknown settings \['params'\]"),
        ({"comfy_quant": b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": "16"}'},
         r"unknown settings \['convrot_groupsize'\]"),
        ({"comfy_quant": b'{"format": ["int8_tensorwise"]}'}, r"1 layers \['int8_tensorwise'\]"),
        ({"comfy_quant": b"{oops"}, "is not readable"),
    ],
)
def test_parts_that_do_not_fit(change, said):
    stored = stored_with(quantise(canonical("gates")[f"{LAYER}.weight"], 16))
    for part, value in change.items():
        if value is None:
            del stored[f"{LAYER}.{part}"]
        else:
            raw = isinstance(value, bytes)
            stored[f"{LAYER}.{part}"] = torch.tensor(list(value), dtype=torch.uint8) if raw else value
    with pytest.raises(CheckpointError, match=said):
        names.to_canonical(stored)


def test_a_scale_without_a_quantised_weight_is_no_part_of_the_model():
    stray = {f"{LAYER}.weight_scale": torch.tensor(0.5)}
    assert f"mlp.fc1.weight_scale: 1 unknown ({LAYER}.weight_scale)" in refused(canonical("gates") | stray)


@pytest.mark.parametrize("name", ["rope.inv_freq", "final_layer.video_out.bias"])
def test_whole_numbers_are_no_weights(name):
    stored = canonical("gates")
    said = refused(stored | {name: stored[name].to(torch.int32)})
    assert f"{name} is I32 {list(stored[name].shape)}: values of type I32 are not read" in said


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none(bad):
    weight = quantise(canonical("gates")[f"{LAYER}.weight"])
    weight.scale[5] = bad
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight_scale: a scale is zero, negative or not finite"):
        names.to_canonical(stored_with(weight))


def test_a_marker_without_a_layer():
    stored = canonical("gates")
    marked = {"comfy_quant": torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)}
    assert "blocks.9.mlp.fc1 is marked" in refused(stored | {f"blocks.9.mlp.fc1.{k}": t for k, t in marked.items()})
