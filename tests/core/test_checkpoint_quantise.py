"""Mirrors checkpoint/quantise.py, convert.py and stream.py: bounds that follow from the formats, files read back."""

import json

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint import names
from comfyui_fasth3.fasth3_core.checkpoint.component import open_component
from comfyui_fasth3.fasth3_core.checkpoint.convert import Choice, convert, mean_loss
from comfyui_fasth3.fasth3_core.checkpoint.files import Stored
from comfyui_fasth3.fasth3_core.checkpoint.load import RECORD, load_model
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight, Spec
from comfyui_fasth3.fasth3_core.checkpoint.quantise import quantise, rotate, spec_for
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.checkpoint.stream import write_stream
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError
from comfyui_fasth3.kernels.int8_linear import hadamard, int8_linear
from safetensors.torch import load_file

from .checkpoints import assert_same
from .tiny import tiny_tensors

SHAPE = (96, 512)


def heavy_tailed(shape=SHAPE) -> torch.Tensor:
    """Like trained weights, with outlying channels."""
    weight = torch.randn(shape) / shape[1] ** 0.5
    weight[:, ::97] *= 12
    return weight


@pytest.mark.parametrize("group", [None, 16, 256])
def test_int8_stays_within_half_a_step(group):
    weight = heavy_tailed()
    made, loss = quantise(weight, Spec("int8_tensorwise", group))
    error = made.dequantise(torch.float32) - weight
    # each rotated value is off by half a step at most, and a rotation keeps the length of a row
    bound = made.scale[:, 0] / 2 * SHAPE[1] ** 0.5
    assert (error.norm(dim=1) <= bound * (1 + 1e-5)).all()
    rotated = (weight.view(-1, group) @ hadamard(group)).view_as(weight) if group else weight
    assert (made.data * made.scale - rotated).abs().le(made.scale / 2 * (1 + 1e-4)).all()
    assert made.data.abs().amax(1).eq(127).all(), "the range is used whole"
    # rounding is even over the step: its variance is a twelfth of the step's square
    expected = float((made.scale.square() * SHAPE[1] / 12).sum().sqrt() / weight.norm())
    assert loss == pytest.approx(expected, rel=0.05)
    assert loss == pytest.approx(float(error.norm() / weight.norm()), rel=1e-4)
    with pytest.raises(AssertionError):  # a wrong scale is seen
        worse = made.dequantise(torch.float32) * 1.01 - weight
        assert float(worse.norm() / weight.norm()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
def test_rotation_in_two_products_is_the_whole_one(group):
    rows = torch.randn(5, 2048)
    want = (rows.double().view(-1, group) @ hadamard(group).double()).view_as(rows)
    torch.testing.assert_close(rotate(rows, group).double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(rotate(rotate(rows, group), group), rows, rtol=0, atol=2e-6)


def test_rotation_spreads_outliers():
    plain, rotated = (quantise(heavy_tailed(), Spec("int8_tensorwise", g))[1] for g in (None, 256))
    assert rotated < plain / 2


def test_fp8_stays_within_half_a_step():
    weight = heavy_tailed()
    made, loss = quantise(weight, Spec("float8_e4m3fn"))
    assert made.scale.unique().numel() == 1, "ComfyUI takes one number"
    scale = made.scale[0, 0]
    # three bits of mantissa: half a step is 2^-4 of a normal value, 2^-10 of the scale below those
    error = (made.dequantise(torch.float32) - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 16, scale * 2**-10) * (1 + 1e-5)).all()
    assert made.data.float().abs().max() == 448
    assert 0.02 < loss < 0.04
    assert float(((made.dequantise(torch.float32) * 1.05) - weight).norm() / weight.norm()) > 0.05


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_zeros_and_rows_of_zeros(form):
    weight = torch.zeros(4, 64)
    made, loss = quantise(weight, spec_for(form, 64))
    assert not made.dequantise(torch.float32).any() and (made.scale > 0).all() and loss == 0
    weight[1] = 1.0
    made, _ = quantise(weight, spec_for(form, 64))
    torch.testing.assert_close(made.dequantise(torch.float32), weight, rtol=0.01, atol=0)


def test_group_is_the_largest_power_of_four_that_divides():
    assert [spec_for("int8", n).group for n in (5376, 2688, 80, 100)] == [256, 64, 16, None]
    assert spec_for("int8", 5376, 0) == Spec("int8_tensorwise") and spec_for("fp8", 5376) == Spec("float8_e4m3fn")


@pytest.mark.parametrize("case", range(3))
def test_recorded_weights_come_out_again(golden_dir, case):
    """What a recorded int8 weight stands for is quantised to the same integers and scales."""
    data = load_file(golden_dir / "int8_linear.safetensors")
    fields = json.loads(bytes(data[f"{case}.comfy_quant"].tolist()))
    spec = Spec(fields["format"], fields["convrot_groupsize"] if fields["convrot"] else None)
    made, _ = quantise(data[f"{case}.dequantized"], spec)
    full = data[f"{case}.weight"].abs().amax(1) == 127  # other rows have a step of their own
    assert full.float().mean() > 0.9
    assert torch.equal(made.data[full], data[f"{case}.weight"][full])
    scale = data[f"{case}.weight_scale"].reshape(-1, 1).expand_as(made.scale)
    torch.testing.assert_close(made.scale[full], scale[full], rtol=1e-6, atol=0)
    y = int8_linear(data[f"{case}.x"], made.data, made.scale, group=made.group)
    torch.testing.assert_close(y, data[f"{case}.y"], rtol=0, atol=1e-5 * float(data[f"{case}.y"].abs().max()))


def test_a_layer_of_the_released_size():
    weight = torch.randn(7168, 5376, dtype=torch.bfloat16) / 5376**0.5
    made, loss = quantise(weight, spec_for("int8", 5376))
    assert made.group == 256 and made.nbytes < 0.51 * weight.nbytes
    # gaussian rows: the largest of 5376 is about 3.9 sigma, so a step is 3.9 / 127 and its error a step / sqrt 12
    assert loss == pytest.approx(3.9 / 127 / 12**0.5, rel=0.1)


# --- whole files


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "release" / "transformer"
    save({n: t.bfloat16() if t.ndim == 2 and ".blocks" not in n and "blocks" in n else t
          for n, t in tiny_tensors().items()}, folder, layout="diffusers", shards=2,
         config={"rope_freq_dim": 4})  # fmt: skip
    return folder


def converted(source, path, **choice):
    component = open_component(source)
    layers = convert(component, names.plan_transformer(component), path, Choice(**choice))
    return layers, load_model(path, contract="preview-4")


def tensors(model) -> dict:
    with model.opened.component.open() as reader:
        return {name: entry.load(reader) for name, entry in model.store.plan.entries.items()}


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_written_and_read_back(source, tmp_path, form):
    layers, model = converted(source, tmp_path / "out.safetensors", form=form)
    plain, made = tensors(load_model(source, contract="preview-4")), tensors(model)
    assert made.keys() - plain.keys() == {"rope.inv_freq"} and plain.keys() <= made.keys()
    assert model.store.plan.layout == "single-file" and len(layers) == 18 == len(model.store.plan.quantised)
    for name, weight in made.items():
        if isinstance(weight, QuantizedWeight):
            again, loss = quantise(plain[name], weight.spec)
            assert_same({name: weight}, {name: again})
            assert loss == next(layer.loss for layer in layers if f"{layer.layer}.weight" == name)
        elif name in plain:
            assert torch.equal(weight, plain[name]) and weight.dtype == plain[name].dtype, name
    assert 0.001 < mean_loss(layers) < 0.04
    raw = load_file(tmp_path / "out.safetensors")  # the format's own library reads it
    assert raw["blocks.0.attn.qkv_proj.weight_scale"].shape == ((192, 1) if form == "int8" else ())
    assert json.loads(bytes(raw["blocks.0.mlp.fc1.comfy_quant"].tolist()))["format"] == layers[0].spec.format


def test_the_source_is_quantised_the_same_from_every_layout(source, tmp_path):
    plain = tensors(load_model(source, contract="preview-4"))
    made = []
    for layout in names.LAYOUTS:
        save(plain, tmp_path / f"{layout}.safetensors", layout=layout, config=None)
        component = open_component(tmp_path / f"{layout}.safetensors")
        config = {"rope_freq_dim": 4}
        component = type(component)(component.root, component.files, config)
        convert(component, names.plan_transformer(component), tmp_path / f"{layout}.out", Choice(form="int8"))
        made.append(load_file(tmp_path / f"{layout}.out"))
    assert all(a.keys() == made[0].keys() and all(torch.equal(a[n], made[0][n]) for n in a) for a in made)


def test_what_is_kept_and_what_is_added(source, tmp_path):
    import re

    layers, model = converted(source, tmp_path / "a.safetensors", form="int8", keep=re.compile(r"^blocks\.0\."))
    assert {layer.layer.split(".")[1] for layer in layers if layer.layer.startswith("blocks")} == {"1"}
    layers, model = converted(source, tmp_path / "b.safetensors", form="int8", adaln=True)
    adaln = [layer for layer in layers if "adaln" in layer.layer]
    assert len(adaln) == 2 and all(layer.spec.group == 16 for layer in adaln)
    model.store.materialise("cpu")
    assert model.store.block_tables("any", lambda block: (block["adaln_proj.linear.weight"].dequantise(torch.float32),))


def test_a_bank_of_heads_changes_its_form_with_the_layout(tmp_path):
    bank = tiny_tensors(output_heads=32)
    save(bank, tmp_path / "m" / "transformer", layout="diffusers", config={"rope_freq_dim": 4})
    component = open_component(tmp_path / "m" / "transformer")
    convert(component, names.plan_transformer(component), tmp_path / "out.safetensors", Choice(form="int8"))
    made = load_file(tmp_path / "out.safetensors")["final_layer.video_out.weight"].view(32, 96, -1)
    heads = bank["final_layer.video_out.weight"].view(32, 96, -1)
    assert torch.equal(made[0], heads[0])
    torch.testing.assert_close(made[1:] + made[:1], heads[1:])


def test_the_contract_travels_in_the_header(source, tmp_path):
    from comfyui_fasth3.cli import main

    record = {"dmd_denoising_steps": [999, 749, 500, 250], "model_id": "tiny", "vsa_sparsity": 0.85}
    (source.parent / RECORD).write_text(json.dumps(record))
    assert main(["quantize", str(source), str(tmp_path / "out.safetensors")]) == 0
    (source.parent / RECORD).unlink()
    model = load_model(tmp_path / "out.safetensors")
    assert (model.contract.name, model.contract.sparsity) == ("preview-4", 0.85)


def test_quantised_twice_is_refused(source, tmp_path):
    converted(source, tmp_path / "a.safetensors", form="int8")
    with pytest.raises(CheckpointError, match=r"18 of its layers are quantised already.*Start from the bf16"):
        converted(tmp_path / "a.safetensors", tmp_path / "b.safetensors", form="fp8")


def test_values_that_are_not_finite(tmp_path):
    bad = tiny_tensors()
    bad["blocks.1.mlp.fc2.weight"][3, 3] = float("inf")
    save(bad, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mlp\.fc2\.weight holds values that are not finite"):
        converted(tmp_path / "m.safetensors", tmp_path / "out.safetensors", form="int8")
    assert {path.name for path in tmp_path.iterdir()} == {"m.safetensors"}, "nothing half-written is left"


def test_a_full_disk_is_said_before_the_work(source, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ConfigError, match="GB free; this one has 0"):
        converted(source, tmp_path / "out.safetensors", form="int8")


def test_an_interrupt_leaves_nothing(source, tmp_path):
    component = open_component(source)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(component, names.plan_transformer(component), tmp_path / "out.safetensors", Choice(form="int8"),
                on_bytes=stop)  # fmt: skip
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*"))


def test_a_stream_must_be_what_its_header_says(tmp_path):
    layout = {"a": Stored("F32", (2,)), "b": Stored("BF16", (1, 3))}
    good = {"a": torch.ones(2), "b": torch.zeros(1, 3, dtype=torch.bfloat16)}
    write_stream(tmp_path / "x.safetensors", layout, good.items(), {"note": "n"})
    assert_same(load_file(tmp_path / "x.safetensors"), good)
    assert open_component(tmp_path / "x.safetensors").metadata["note"] == "n"
    for values in ({"a": torch.ones(3)}, {"b": good["b"]}, {"a": good["a"]}):
        with pytest.raises(ValueError, match=r"next is|no value for b"):
            write_stream(tmp_path / "y.safetensors", layout, values.items())
    assert not (tmp_path / "y.safetensors").exists()
