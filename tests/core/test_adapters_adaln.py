"""Adapters of full AdaLN width on files that keep a few inputs: what the linears give at every time is the proof."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.apply import Settings, apply_adapter
from comfyui_fasth3.fasth3_core.adapters.time_basis import time_features
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from comfyui_fasth3.fasth3_core.model.time import adaln_features, block_table, final_table
from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter

from .adapter_corpus import SPELLINGS, changes, spelled
from .test_adapters import DIMS, loaded, write
from .tiny import tiny_tensors

KEPT, GRID = 8, 257
RTOL = 1e-3
"""Of the largest table value: eight of 32 time features leave a few 1e-5 of them, and the grid is linear in between."""
TIMES = torch.linspace(0, 1, 9)


def narrow(full: dict, form: str, centred: bool = False) -> dict:
    """The rank or curve form of a full transformer."""
    wide = time_features(full, GRID)
    mean = wide.mean(0) if centred else torch.zeros_like(wide[0])
    basis = torch.linalg.svd(wide - mean, full_matrices=False).Vh[:KEPT].T
    out = {}
    for name, tensor in full.items():
        if name.endswith("adaln_proj.linear.weight"):
            out[name] = (tensor.double() @ basis).float()
        elif name.endswith("adaln_proj.linear.bias"):
            weight = full[name.replace(".bias", ".weight")]
            out[name] = (tensor.double() + weight.double() @ mean).float()
        elif not (form == "curve" and name.startswith("time_embedder.")):
            out[name] = tensor
    extra = {"adaln_t_table": (wide - mean) @ basis} if form == "curve" else {"adaln_basis.weight": basis.T}
    return out | {name: tensor.float().contiguous() for name, tensor in extra.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(canonical weights, name -> path) of one base in four forms."""
    root, full = tmp_path_factory.mktemp("adaln"), tiny_tensors(gates=False)
    forms = {"full": full, "rank": narrow(full, "rank"), "curve": narrow(full, "curve"),
             "centred": narrow(full, "curve", centred=True)}  # fmt: skip
    for name, weights in forms.items():
        save(weights, root / name / "a.safetensors")
    return full, {name: root / name / "a.safetensors" for name in forms}


def tables(model) -> list[torch.Tensor]:
    """What the AdaLN linears of a model give at TIMES: every block's, then the output norm's."""
    w, config = {name: t.float() for name, t in loaded(model).items()}, model.config
    features = adaln_features(w, config, TIMES)
    blocks = [
        block_table(features, {n.removeprefix(f"blocks.{i}."): t for n, t in w.items()}, torch.float32)
        for i in range(config.num_layers)
    ]
    return [*blocks, final_table(features, w)]


def assert_tables(model, want) -> None:
    for have, value in zip(tables(model), want, strict=True):
        torch.testing.assert_close(have, value, rtol=0, atol=RTOL * float(value.abs().max()))
        with pytest.raises(AssertionError):
            torch.testing.assert_close(have * 1.01, value, rtol=0, atol=RTOL * float(value.abs().max()))


@pytest.mark.parametrize("form", ["rank", "curve", "centred"])
def test_pairs_of_full_width_are_projected(files, tmp_path, form):
    _, paths = files
    path = write(tmp_path / "a.safetensors", spelled(changes(DIMS), **SPELLINGS[0]))
    full, _ = apply_adapter(load_model(paths["full"]), path)
    before, after = tables(load_model(paths["full"])), tables(full)
    assert (before[1] - after[1]).abs().max() > 0.05 * after[1].abs().max(), "the adapter must matter here"
    source = "" if form == "rank" else str(paths["full"])
    narrowed, report = apply_adapter(load_model(paths[form]), path, Settings(adaln_source=source))
    assert_tables(narrowed, after)
    assert "projected from 32 AdaLN inputs to 8" in report.to_text() and not report.count("unmatched")


@pytest.mark.parametrize("form", ["rank", "curve", "centred"])
def test_a_student_with_another_time_embedder(files, tmp_path, form):
    """Exact differences of the embedder: a curve file gets another table."""
    full, paths = files
    tensors, metadata = random_adapter(full, size=0.002, dtype=torch.float32)
    path = write(tmp_path / "a.safetensors", tensors, metadata)
    source = "" if form == "rank" else str(paths["full"])
    student, _ = apply_adapter(load_model(paths["full"]), path)
    narrowed, report = apply_adapter(load_model(paths[form]), path, Settings(adaln_source=source))
    assert narrowed.contract.name == "preview-4" and report.matched == len(tensors)
    for have, value in zip(tables(narrowed), tables(student), strict=True):
        torch.testing.assert_close(have, value, rtol=0, atol=1e-2 * float(value.abs().max()))
    if form != "rank":
        twice, _ = apply_adapter(narrowed, path, Settings(strength=-1.0))
        assert_tables(twice, tables(load_model(paths["full"])))


def test_curve_file_without_its_embedder_refuses_with_the_count(files, tmp_path):
    full, paths = files
    path = write(tmp_path / "a.safetensors", *random_adapter(full))
    with pytest.raises(CheckpointError) as error:
        apply_adapter(load_model(paths["curve"]), path)
    said = str(error.value)
    assert "takes AdaLN inputs of full width 32; this curve file keeps 8" in said and "adaln_source" in said
    assert "4 x transformer_blocks.*.adaln_proj.linear.lora_A.weight" in said  # both factors in each of two blocks
    assert "a curve file keeps no time embedder" in said
    model, report = apply_adapter(load_model(paths["curve"]), path, Settings(unmatched="skip"))
    assert report.count("unmatched") == 2 * 2 + 1 + 4 and model.contract.name == "preview-4"


def test_an_embedder_too_far_from_the_basis(files, tmp_path):
    full, paths = files
    path = write(tmp_path / "a.safetensors", *random_adapter(full, size=0.1))
    with pytest.raises(CheckpointError, match=r"\d% of the time features lie outside the 8"):
        apply_adapter(load_model(paths["curve"]), path, Settings(adaln_source=str(paths["full"])))


def test_an_embedder_of_another_model(files, tmp_path):
    other = {name: t for name, t in tiny_tensors(gates=False, seed=5).items() if name.startswith("time_embedder.")}
    path = write(tmp_path / "a.safetensors", spelled(changes(DIMS), **SPELLINGS[0]))
    with pytest.raises(CheckpointError, match=r"not the one that this curve file was made from .*leave \d+"):
        apply_adapter(
            load_model(files[1]["curve"]), path,
            Settings(adaln_source=str(write(tmp_path / "other.safetensors", other))),
        )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"has no time_embedder\.proj_in\.weight"):
        apply_adapter(load_model(files[1]["curve"]), path, Settings(adaln_source=str(files[1]["curve"])))


def test_a_small_file_with_the_embedder_alone_will_do(files, tmp_path):
    full, paths = files
    renamed = {name.replace("proj_in", "linear_1").replace("proj_out", "linear_2"): t
               for name, t in full.items() if name.startswith("time_embedder.")}  # fmt: skip
    path = write(tmp_path / "a.safetensors", spelled(changes(DIMS), **SPELLINGS[0]))
    source = str(write(tmp_path / "embedder.safetensors", renamed))
    narrowed, _ = apply_adapter(load_model(paths["curve"]), path, Settings(adaln_source=source))
    assert_tables(narrowed, tables(apply_adapter(load_model(paths["full"]), path)[0]))


def test_an_adapter_made_on_a_curve_file(files, tmp_path):
    _, paths = files
    path = write(tmp_path / "a.safetensors", spelled(changes(DIMS | {"time_embed_dim": KEPT}), **SPELLINGS[0]))
    apply_adapter(load_model(paths["curve"]), path)
    with pytest.raises(CheckpointError, match="made on a file whose AdaLN keeps 8 inputs; this one has 32"):
        apply_adapter(load_model(paths["full"]), path)
