"""The released adapters on the released models, by their headers: every name, every shape, no value.

The files are sparse: they take no room on disk.
"""

import json
import os

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.apply import Settings, apply_adapter
from comfyui_fasth3.fasth3_core.adapters.file import open_adapter
from comfyui_fasth3.fasth3_core.checkpoint import names
from comfyui_fasth3.fasth3_core.checkpoint.dtypes import NAMES
from comfyui_fasth3.fasth3_core.checkpoint.files import Stored
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.shapes import expected
from comfyui_fasth3.fasth3_core.checkpoint.stream import file_header
from comfyui_fasth3.fasth3_core.checkpoint.transformer_shapes import templates
from comfyui_fasth3.fasth3_core.config import DiTConfig
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from comfyui_fasth3.fasth3_core.weights.policy import weight_dtype

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs sparse files")

RANK = 64
DIMS = dict(
    hidden=5376, inner=7168, head=128, ffn=14336, text=5120, video_row=96, audio_row=32, modulation=2688,
    time_hidden=5376, freq=256, rope=16,
)


def sparse(path, layout: dict[str, Stored], metadata: dict[str, str] | None = None, nonzero: str = ""):
    """A file of zeros, but for the first value of one tensor."""
    header, size = file_header(layout, metadata or {})
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
        if nonzero:
            before = 0
            for name, stored in layout.items():
                if name == nonzero:
                    break
                before += stored.nbytes
            file.seek(len(header) + before)
            file.write(b"\x80\x3f")
    return path


@pytest.fixture(scope="module")
def base() -> dict[str, Stored]:
    """Canonical name -> what a full-size base has."""
    present = {f"blocks.{i}.norm1.weight": () for i in range(50)}
    present |= {f"token_refiner.blocks.{i}.norm1.weight": () for i in range(2)}
    required, optional = templates(present)
    shapes = expected({**required, **optional}, DIMS)
    return {name: Stored(NAMES[weight_dtype(name, "full", torch.bfloat16)], shape) for name, shape in shapes.items()}


def adapter_layout(base: dict[str, Stored]) -> dict[str, Stored]:
    """Names and shapes of the VSA adapter: 362 pairs, 82 differences, 50 gates; 856 tensors."""
    diffusers = {}
    for name, stored in base.items():
        layer, _, leaf = name.rpartition(".")
        group = names.TRANSFORMER.group(layer, "diffusers") if name != "rope.inv_freq" else None
        for source in group.source if group else ():
            diffusers[f"{source}.{leaf}"] = (stored.shape[0] // len(group.source), *stored.shape[1:])
    layout = {}
    for name, shape in diffusers.items():
        layer, _, leaf = name.rpartition(".")
        blocks = layer.startswith(("transformer_blocks.", "token_refiner.refiner_blocks."))
        if leaf == "weight" and blocks and len(shape) == 2:
            layout[f"{layer}.lora_A.weight"] = Stored("BF16", (RANK, shape[1]))
            layout[f"{layer}.lora_B.weight"] = Stored("BF16", (shape[0], RANK))
        elif not blocks or leaf == "bias":
            layout[f"{layer}.diff{'_b' * (leaf == 'bias')}"] = Stored("BF16", shape)
    norms = [name for name in diffusers if ".norm1.weight" in name][: 82 - sum(".diff" in n for n in layout)]
    layout |= {name.replace(".weight", ".diff"): Stored("BF16", diffusers[name]) for name in norms}
    gates = {f"transformer_blocks.{i}.attn.to_gate_compress.set_weight": Stored("BF16", (7168, 5376))
             for i in range(50)}  # fmt: skip
    return layout | gates


METADATA = {
    "format": "fastvideo-lora-v2", "base_model": "MiniMaxAI/MiniMax-H3", "rank": "64", "low_rank_tensors": "724",
    "diff_tensors": "82", "set_weight_tensors": "50",
    "finetuned_model": "FastVideo/FastVideo-FastH3-4-step-Preview-v1-VSA-DataFree",
}


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    first = "transformer_blocks.0.attn.to_gate_compress.set_weight"
    path = tmp_path_factory.mktemp("adapter") / "adapter_model.safetensors"
    return sparse(path, adapter_layout(base), METADATA, first)


def test_the_released_counts(adapter):
    opened = open_adapter(adapter)
    assert len(opened.component.tensors) == 856 and opened.ranks() == {RANK: 362} and not opened.unknown


def int8(base: dict[str, Stored]) -> dict[str, Stored]:
    """Every matrix of the blocks in int8, with a scale a row, as the header entry for older files has it."""
    layout = {}
    for name, stored in base.items():
        quantised = (".attn." in name and len(stored.shape) == 2) or ".mlp." in name
        layout[name] = Stored("I8", stored.shape) if quantised else stored
        if quantised:
            layout[name.replace(".weight", ".weight_scale")] = Stored("F32", (stored.shape[0], 1))
    return layout


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_every_tensor_has_its_place_in_the_base(base, adapter, tmp_path, form):
    layout = base if form == "bf16" else int8(base)
    marked = {n[: -len(".weight")]: {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
              for n, s in layout.items() if s.dtype == "I8"}  # fmt: skip
    path = sparse(tmp_path / "base.safetensors", layout, {"_quantization_metadata": json.dumps({"layers": marked})})
    model, report = apply_adapter(load_model(path), adapter)
    assert report.matched == 856 and report.count("created") == 50 and not report.warnings
    assert report.count("beside") == (0 if form == "bf16" else 312 * 2)
    assert model.contract.name == "preview-4" and model.config == DiTConfig.from_shapes(model.store.plan.shapes)
    shapes = {name: entry.shape for name, entry in model.store.plan.entries.items()}
    assert shapes == {**{n: s.shape for n, s in base.items()},
                      **{f"blocks.{i}.attn.to_gate_compress.weight": (7168, 5376) for i in range(50)}}  # fmt: skip
    added = model.store.nbytes() - load_model(path).store.nbytes()
    gates = 50 * 7168 * 5376 * model.store.dtype_on("cpu").itemsize
    factors = 0 if form == "bf16" else sum(
        s.shape[0] * s.shape[1] * 4 for n, s in open_adapter(adapter).component.tensors.items()
        if ".lora_" in n and "adaln" not in n
    )  # fmt: skip
    assert added == gates + factors


def test_a_pruned_base_says_what_it_lacks(base, adapter, tmp_path):
    curve = {n: s for n, s in base.items() if not n.startswith("time_embedder.")}
    curve = {n: Stored("F32", (s.shape[0], 8) if n.endswith(".weight") else s.shape) if "adaln_proj" in n else s
             for n, s in curve.items()}  # fmt: skip
    path = sparse(tmp_path / "base.safetensors", curve | {"adaln_t_table": Stored("F32", (1025, 8))})
    with pytest.raises(CheckpointError) as error:
        apply_adapter(load_model(path), adapter)
    said = str(error.value)
    assert "105 tensors fit nothing" in said and "100 x transformer_blocks.*.adaln_proj" in said
    _, report = apply_adapter(load_model(path), adapter, Settings(unmatched="skip"))
    assert report.matched == 856 - 105
