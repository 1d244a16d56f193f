"""Mirrors fasth3_core/adapters/: every spelling gives the weights of the plain formula, on every form of base."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.apply import Settings, apply_adapter
from comfyui_fasth3.fasth3_core.adapters.weight import AdaptedWeight
from comfyui_fasth3.fasth3_core.checkpoint import names
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, FastH3Error
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st
from safetensors.torch import save_file

from .adapter_corpus import SPELLINGS, changes, deltas, expected, spelled
from .tiny import tiny_tensors

DIMS = dict(hidden_size=64, inner=64, ffn_dim=48, time_embed_dim=32, text_dim=20)
ATOL = 2e-6
"""Weights below 3 after an fp32 product over three ranks: a few roundings."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """(canonical weights, layout -> loaded model) of one base without gates, fp32."""
    root, tensors = tmp_path_factory.mktemp("bases"), tiny_tensors(gates=False)
    models = {}
    for layout in names.LAYOUTS:
        folder = root / layout / "transformer"
        save(tensors, folder, layout=layout, config={"rope_freq_dim": 4})
        models[layout] = load_model(folder)
    return tensors, models


def write(path, tensors, metadata=None):
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata=metadata)
    return path


def loaded(model) -> dict:
    """Every canonical weight of a model, as its entries load it."""
    with model.opened.component.open() as reader:
        return {name: entry.load(reader) for name, entry in model.store.plan.entries.items()}


def assert_weights(model, want, atol=ATOL):
    have = loaded(model)
    assert have.keys() - {"rope.inv_freq"} == want.keys() - {"rope.inv_freq"}
    for name in have:
        value = want[name].double()
        torch.testing.assert_close(have[name].double(), value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", names.LAYOUTS)
@pytest.mark.parametrize("style", ["diffusers", "fused", "mixed", "flat diffusers", "flat fused"])
def test_every_spelling_gives_the_weights_of_the_formula(bases, tmp_path, style, layout):
    base, models = bases
    pairs = changes(DIMS)
    for number, how in enumerate(s for s in SPELLINGS if s["style"] == style):
        path = write(tmp_path / f"{number}.safetensors", spelled(pairs, **how))
        model, report = apply_adapter(models[layout], path, Settings(strength=0.75))
        assert report.matched == sum(row.tensors for row in report.rows) and report.count("merged") == report.matched
        assert bool(report.warnings) is not how["alpha"]
        assert_weights(model, expected(base, deltas(pairs, how["alpha"]), 0.75))


def test_the_tolerance_bites(bases, tmp_path):
    base, models = bases
    pairs = changes(DIMS)
    model, _ = apply_adapter(models["diffusers"], write(tmp_path / "a.safetensors", spelled(pairs, **SPELLINGS[0])))
    with pytest.raises(AssertionError):
        assert_weights(model, expected(base, deltas(pairs, True), 1.01))
    swapped = {n: torch.cat(t.chunk(2)[::-1]) if "net.0.proj.lora_B" in n else t
               for n, t in spelled(pairs, **SPELLINGS[0]).items()}  # fmt: skip
    model, _ = apply_adapter(models["diffusers"], write(tmp_path / "b.safetensors", swapped))
    with pytest.raises(AssertionError):
        assert_weights(model, expected(base, deltas(pairs, True)))


def test_fused_factors_that_follow_the_official_row_order(bases, tmp_path):
    """Head by head, as its metadata says: the same change as grouped."""
    base, models = bases
    pairs = changes(DIMS)
    how = dict(style="fused", prefix="", factors=("lora_A", "lora_B"), infix="", alpha=False)
    tensors = spelled(pairs, **how)
    for name, tensor in tensors.items():
        if "qkv_proj.lora_B" in name:  # q, k, v of 2 heads of 32 -> q, k, v of each head
            tensors[name] = tensor.view(3, 2, 32, -1).transpose(0, 1).reshape(tensor.shape)
    path = write(tmp_path / "a.safetensors", tensors, {"fasth3.layout": "original"})
    model, _ = apply_adapter(models["single-file"], path)
    assert_weights(model, expected(base, deltas(pairs, False)))
    model, _ = apply_adapter(models["single-file"], write(tmp_path / "b.safetensors", tensors))
    with pytest.raises(AssertionError):
        assert_weights(model, expected(base, deltas(pairs, False)))


def test_alpha_of_the_metadata_of_peft_and_of_the_user(bases, tmp_path):
    base, models = bases
    pairs = changes(DIMS)
    tensors = spelled(pairs, **(SPELLINGS[0] | {"alpha": False}))
    want = expected(base, {layer: change * 8.0 / 3 for layer, change in deltas(pairs, False).items()})
    stated = [
        ({"alpha": "8"}, Settings()),
        ({"lora_adapter_metadata": json.dumps({"lora_alpha": 8, "r": 3})}, Settings()),
        ({}, Settings(alpha=8.0)),
    ]
    for number, (metadata, settings) in enumerate(stated):
        path = write(tmp_path / f"{number}.safetensors", tensors, metadata)
        model, report = apply_adapter(models["diffusers"], path, settings)
        assert_weights(model, want, atol=4 * ATOL)
        assert not report.warnings and "scale 2.66667" in report.to_text()


def test_the_configuration_that_peft_writes_beside_its_file(bases, tmp_path):
    base, models = bases
    pairs = changes(DIMS)
    path = write(tmp_path / "adapter_model.safetensors", spelled(pairs, **(SPELLINGS[0] | {"alpha": False})))
    for config, scale in (({"lora_alpha": 6, "r": 3}, 2.0), ({"lora_alpha": 6, "use_rslora": True}, 6 / 3**0.5)):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        model, report = apply_adapter(models["diffusers"], path)
        want = {layer: change * scale for layer, change in deltas(pairs, False).items()}
        assert_weights(model, expected(base, want), atol=4 * ATOL)
        assert not report.warnings
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 6, "alpha_pattern": {"to_q": 2}}))
    with pytest.raises(CheckpointError, match="alpha_pattern, which gives layers alphas of their own"):
        apply_adapter(models["diffusers"], path)
    path = path.rename(tmp_path / "mine.safetensors")  # another file than the configuration speaks of
    assert apply_adapter(models["diffusers"], path)[1].warnings


def test_the_file_says_more_than_the_user(bases, tmp_path):
    base, models = bases
    pairs = changes(DIMS)
    path = write(tmp_path / "a.safetensors", spelled(pairs, **SPELLINGS[0]))
    model, _ = apply_adapter(models["diffusers"], path, Settings(alpha=100.0))
    assert_weights(model, expected(base, deltas(pairs, True)))


def test_several_in_a_row_are_rounded_once(bases, tmp_path):
    """bf16: two adapters give what their sum gives, rounded once, and not what rounding in between gives."""
    tensors = {name: t.bfloat16() for name, t in bases[0].items()}
    save(tensors, tmp_path / "base.safetensors", metadata={})
    model = load_model(tmp_path / "base.safetensors")
    first, second = changes(DIMS, 1), changes(DIMS, 2)
    total = expected(tensors, deltas(first, True))
    total = expected(total, deltas(second, True), -0.5)
    for number, (pairs, strength) in enumerate([(first, 1.0), (second, -0.5)]):
        path = write(tmp_path / f"{number}.lora.safetensors", spelled(pairs, **SPELLINGS[0]))
        model, _ = apply_adapter(model, path, Settings(strength=strength))
    have = loaded(model)
    assert [a["strength"] for a in model.details["adapters"]] == [1.0, -0.5]
    for name, value in total.items():
        off = have[name] != value.float().bfloat16()
        # fp32 sums may tie another way than fp64 ones: a handful of values, by one step
        assert off.float().mean() < 1e-3, name


def test_strength_zero_is_the_model_itself(bases, tmp_path):
    model = bases[1]["diffusers"]
    path = write(tmp_path / "a.safetensors", spelled(changes(DIMS), **SPELLINGS[0]))
    again, report = apply_adapter(model, path, Settings(strength=0.0))
    assert again is model and report.matched
    with pytest.raises(ConfigError, match="strength"):
        Settings(strength=float("nan"))


def test_the_same_adapters_share_a_store(bases, tmp_path):
    model = bases[1]["diffusers"]
    path = write(tmp_path / "a.safetensors", spelled(changes(DIMS), **SPELLINGS[0]))
    one, _ = apply_adapter(model, path)
    two, _ = apply_adapter(load_model(model.source), path)
    other, _ = apply_adapter(model, path, Settings(strength=0.5))
    assert one.store is two.store and other.store is not one.store and one.store is not model.store


def test_nothing_matched_is_an_error(bases, tmp_path):
    model = bases[1]["diffusers"]
    flux = {f"double_blocks.0.img_attn.qkv.lora_{p}.weight": torch.zeros(4, 4) for p in ("A", "B")}
    path = write(tmp_path / "flux.safetensors", flux)
    for rule in ("refuse", "skip"):
        with pytest.raises(CheckpointError, match=r"nothing of it fits this model:\s+1 x double_blocks.*no layer of"):
            apply_adapter(model, path, Settings(unmatched=rule))


def test_tensors_that_fit_nothing_are_refused_or_skipped_and_listed(bases, tmp_path):
    base, models = bases
    pairs = changes(DIMS)
    strange = {
        "lora_te1_text_model_encoder.lora_down.weight": torch.zeros(2, 2),
        "transformer_blocks.7.attn.to_q.lora_A.weight": torch.zeros(3, 64),
        "transformer_blocks.7.attn.to_q.lora_B.weight": torch.zeros(64, 3),
        "transformer_blocks.0.attn.to_q.lora_A.weight": torch.zeros(3, 60),
        "transformer_blocks.0.attn.to_q.lora_B.weight": torch.zeros(64, 3),
        "transformer_blocks.0.attn.to_v.diff": torch.zeros(2, 64),
        "transformer_blocks.0.norm1.diff_b": torch.zeros(64),
        "proj_out.set_weight": torch.zeros(4 * 96, 64),
    }
    path = write(tmp_path / "a.safetensors", spelled(pairs, **SPELLINGS[0]) | strange)
    with pytest.raises(CheckpointError) as error:
        apply_adapter(models["diffusers"], path)
    for said in ("of the text encoder", "the model has 2 blocks", "takes 60 inputs, the layer 64", "has no bias",
                 "is [2, 64], the layer [64, 64]", "a bank of 4 output heads", "set unmatched to 'skip'"):  # fmt: skip
        assert said in str(error.value)
    model, report = apply_adapter(models["diffusers"], path, Settings(unmatched="skip"))
    assert report.count("unmatched") == len(strange)
    assert_weights(model, expected(base, deltas(pairs, True)))
    assert "8 unmatched" in report.summary() and len(model.details["adapters"][0]["not_used"]) >= 6


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"x.lora_A.weight": torch.zeros(2, 2), "x.dora_scale": torch.zeros(2)}, "DoRA"),
        ({"blocks.0.attn.qkv_proj.hada_w1_a": torch.zeros(2, 2)}, "LoHa"),
        ({"blocks.0.attn.qkv_proj.lokr_w1": torch.zeros(2, 2)}, "LoKr"),
        ({"blocks.0.attn.out_proj.lora_A.weight": torch.zeros(2, 64)}, "has no up factor beside it"),
        ({"blocks.0.attn.out_proj.alpha": torch.zeros(()), "a.diff": torch.zeros(1)}, "has no factors beside it"),
        ({"blocks.0.attn.out_proj.lora_A.weight": torch.zeros(2, 64),
          "blocks.0.attn.out_proj.lora_B.weight": torch.zeros(64, 3)}, r"are no \[rank, in\] and \[out, rank\]"),
        ({"blocks.0.mlp.fc2.lora_A.weight": torch.zeros(2, 48), "blocks.0.mlp.fc2.lora_B.weight": torch.zeros(64, 2),
          "diffusion_model.blocks.0.mlp.fc2.lora_A.weight": torch.zeros(2, 48)}, "are the same tensor"),
        ({"blocks.0.mlp.fc2.lora_A.weight": torch.zeros(2, 48), "blocks.0.mlp.fc2.lora_B.weight": torch.zeros(64, 2),
          "blocks.0.mlp.fc2.alpha": torch.full((1,), float("nan"))}, "expected one number"),
        ({"blocks.0.mlp.fc2.lora_A.weight": torch.zeros(2, 48, dtype=torch.int8),
          "blocks.0.mlp.fc2.lora_B.weight": torch.zeros(64, 2)}, r"lora_A\.weight is I8; read are F64, F32"),
        ({f"{layer}.lora_{factor}.weight": torch.zeros(shape) for factor, shape in (("A", (2, 64)), ("B", (64, 2)))
          for layer in ("transformer_blocks.0.attn.to_out.0", "diffusion_model.blocks.0.attn.out_proj")},
         r"attn\.out_proj and transformer_blocks\.0\.attn\.to_out\.0 are the same layer, named in two ways"),
        ({"text_states": torch.zeros(1), "token_tags": torch.zeros(1)}, "a file of prompt embeddings"),
        ({"something": torch.zeros(1)}, "none of its tensors is an adapter's"),
    ],
)  # fmt: skip
def test_files_that_are_no_whole_adapter(bases, tmp_path, tensors, said):
    with pytest.raises(CheckpointError, match=said):
        apply_adapter(bases[1]["diffusers"], write(tmp_path / "a.safetensors", tensors))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float8_e4m3fn, torch.float64])
def test_an_alpha_of_any_type(bases, tmp_path, dtype):
    tensors, stores = spelled(changes(DIMS), **SPELLINGS[0]), []
    for number, read in enumerate((lambda t: t.to(dtype), lambda t: t.to(dtype).float())):
        made = {name: read(t) if name.endswith("alpha") else t for name, t in tensors.items()}
        model, _ = apply_adapter(bases[1]["diffusers"], write(tmp_path / f"{number}.safetensors", made))
        model.store.materialise("cpu")
        stores.append(model.store.block(0)["attn.out_proj.weight"])
    assert torch.equal(*stores)


def test_adapter_in_the_place_of_a_model(bases, tmp_path):
    path = write(tmp_path / "a.safetensors", spelled(changes(DIMS), **(SPELLINGS[0] | {"infix": ".my-style"})))
    with pytest.raises(CheckpointError, match="FastH3 Apply Adapter"):
        load_model(path)


def test_kept_beside_agrees_with_merged(bases, tmp_path):
    path = write(tmp_path / "a.safetensors", spelled(changes(DIMS), **SPELLINGS[0]))
    merged, _ = apply_adapter(bases[1]["diffusers"], path)
    beside, report = apply_adapter(bases[1]["diffusers"], path, Settings(mode="beside"))
    assert report.count("beside") == 13 * 3 and report.count("merged") == 3 * 3
    a, b = loaded(merged), loaded(beside)
    kept = {name for name, value in b.items() if isinstance(value, AdaptedWeight)}
    assert len(kept) == 9
    for name, value in b.items():
        assert name not in kept or value.nbytes == sum(tensor.nbytes for tensor in value.tensors())
        value = value.dequantise(torch.float32) if name in kept else value
        torch.testing.assert_close(value, a[name], rtol=0, atol=ATOL)
    assert beside.store.nbytes() > merged.store.nbytes()


@fuzz(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_done_to_a_file_every_tensor_is_accounted_for(data):
    """Names, shapes and tensors that come, go or change: an error of ours, or a report with a row for each."""
    tensors = spelled(changes(DIMS), **data.draw(st.sampled_from(SPELLINGS)))
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        tensor = tensors.pop(name)
        match data.draw(st.sampled_from(["drop", "rename", "reshape", "double", "dtype", "diff"])):
            case "rename":
                tensors[name.replace("1", data.draw(st.sampled_from(["0", "9", "x", "1.1", ""])))] = tensor
            case "reshape":
                tensors[name] = torch.zeros(data.draw(st.lists(st.integers(0, 5), max_size=3)))
            case "double":
                tensors |= {name: tensor, f"diffusion_model.{name}": tensor.clone()}
            case "dtype":
                tensors[name] = tensor.to(data.draw(st.sampled_from([torch.float16, torch.float64, torch.int8])))
            case "diff":
                end = data.draw(st.sampled_from([".diff", ".diff_b", ".set_weight"]))
                tensors[name.rsplit(".lora", 1)[0] + end] = tensor
        if not tensors:
            return
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.safetensors", tensors)
        rule = data.draw(st.sampled_from(["refuse", "skip"]))
        try:
            _, report = apply_adapter(FUZZED[0], path, Settings(unmatched=rule))
        except FastH3Error as error:
            assert str(path) in str(error)
            return
        assert sum(row.tensors for row in report.rows) == len(tensors)
        assert rule == "skip" or not report.count("unmatched")


FUZZED: list = []


@pytest.fixture(autouse=True)
def _fuzzed_model(bases):
    FUZZED[:] = [bases[1]["single-file"]]
