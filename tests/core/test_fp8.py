"""dtype="fp8": which weights are quantised, what their products are, and that placing them elsewhere changes no bit."""

import pytest
import torch
import torch.nn.functional as F
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.quant import Spec
from comfyui_fasth3.fasth3_core.checkpoint.quantise import quantise as quantise_weight
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.model.linear import linear, operand_form
from comfyui_fasth3.fasth3_core.model.ops import resolve_token_ops
from comfyui_fasth3.fasth3_core.planning_sizes import released_sizes
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.request import Request
from comfyui_fasth3.fasth3_core.weights import masters
from comfyui_fasth3.fasth3_core.weights.fp8 import Fp8Weight, is_projection, to_fp8
from comfyui_fasth3.fasth3_core.weights.placement import Placement
from comfyui_fasth3.kernels.device import Case

from .checkpoints import quantise
from .tiny import TEXT_DIM, tiny_tensors

CPU = Case(device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tensors():
    return tiny_tensors(gates=True, num_layers=3, seed=3)


@pytest.fixture
def path(tensors, tmp_path):
    return save(tensors, tmp_path / "model.safetensors")


def run(model, **changes):
    text = torch.randn(1, 6, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    request = Request(text_states=text, latent_frames=2, latent_height=4, latent_width=4, audio_latents=8, seed=5)
    return sample(model, request, device="cpu", **changes)


def test_projections_of_the_blocks_and_nothing_else(path, tensors):
    store = load_model(path, contract="preview-4", dtype="fp8").store
    store.materialise("cpu")
    with store.text() as text:
        held = {**store.top(), **text}
    held |= {f"blocks.{i}.{n}": w for i in range(3) for n, w in store.block(i).items()}
    for name, weight in held.items():
        assert isinstance(weight, Fp8Weight) == is_projection(name), name
    name = "blocks.1.mlp.fc2.weight"
    assert torch.equal(held[name].data.view(torch.uint8), to_fp8(tensors[name]).data.view(torch.uint8))
    assert sum(map(is_projection, held)) == 5 * 3
    assert store.nbytes("cpu") == sum(weight.nbytes for weight in held.values())
    assert store.sizes("cpu").blocks == released_sizes(store.config, 4, fp8=True).blocks


def test_a_quantised_layer_is_quantised_anew(tensors, tmp_path):
    name = "blocks.1.mlp.fc1.weight"
    stored = quantise(tensors[name], 16)
    path = save({**tensors, name: stored}, tmp_path / "mixed.safetensors")
    store = load_model(path, contract="preview-4", dtype="fp8").store
    store.materialise("cpu")
    found = store.block(1)["mlp.fc1.weight"]
    expected = to_fp8(stored.dequantise(torch.float32))
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))


def test_stored_float8_is_multiplied_as_it_is(tensors, tmp_path):
    """Quantised as ComfyUI's files are, one scale for the whole weight, which goes to every row."""
    name = "blocks.1.mlp.fc1.weight"
    stored, _ = quantise_weight(tensors[name], Spec("float8_e4m3fn"))
    path = save({**tensors, name: stored}, tmp_path / "scaled.safetensors")
    store = load_model(path, contract="preview-4", dtype="fp8").store
    store.materialise("cpu")
    found = store.block(1)["mlp.fc1.weight"]
    assert isinstance(found, Fp8Weight) and found.dtype == torch.float32
    assert torch.equal(found.data.view(torch.uint8), stored.data.view(torch.uint8))
    assert torch.equal(found.rows.scale, stored.scale) and found.nbytes == store.plan.entries[name].nbytes(None)
    assert torch.equal(found.dequantise(torch.float32), stored.dequantise(torch.float32))


def test_float8_files_are_widened_for_a_product_and_nothing_else_is(path, tensors, tmp_path):
    """As the plan counts it: through fp32, 8 bytes a value with the result."""
    name = "blocks.1.mlp.fc1.weight"
    stored, _ = quantise_weight(tensors[name], Spec("float8_e4m3fn"))
    scaled = save({**tensors, name: stored}, tmp_path / "scaled.safetensors")
    found = [load_model(file, contract="preview-4", dtype=dtype).store.widened_bytes()
             for file in (path, scaled) for dtype in ("auto", "fp8")]
    assert found == [0, 0, 8, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_product_is_that_of_the_rounded_sides(backend, dtype):
    x, W = torch.randn(9, 32, dtype=dtype), torch.randn(48, 32, dtype=dtype)
    ops, weight = resolve_token_ops(backend, CPU), to_fp8(W)
    top = x.float().abs().amax(1, keepdim=True) / 448
    rounded = (x.float() / top).to(torch.float8_e4m3fn).float() * top
    exact = F.linear(rounded.double(), weight.dequantise(torch.float32).double())
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    for given in (x, ops.quantise_rows(x, operand_form(weight, weight))):
        y = linear(given, weight, ops=ops)
        assert y.dtype == dtype
        error, scaled = (((z.double() - exact).norm() / exact.norm()).item() for z in (y, y.float() * 1.01))
        assert error <= bound < scaled
    assert [row["calls"] for row in ops.table() if row["op"] == "fp8_linear"] == [2]
    plain = F.linear(x.double(), W.double())
    assert 1e-2 < ((linear(x, weight, ops=ops).double() - plain).norm() / plain.norm()).item() < 8e-2  # 3 bits a side


def test_rows_are_shared_only_where_every_weight_takes_them():
    W = torch.randn(16, 16)
    assert operand_form(to_fp8(W), W) == operand_form(W) == "" and operand_form(to_fp8(W), to_fp8(W)) == "fp8"


def test_streamed_blocks_give_the_same_latents(path, monkeypatch):
    monkeypatch.setattr(masters, "SMALL", 512)
    model = load_model(path, contract="preview-4", dtype="fp8")
    resident = run(model)
    model.store.place(Placement(streamed=(0, 1, 2), slots=2))
    streamed = run(model)
    assert torch.equal(resident.video, streamed.video) and torch.equal(resident.audio, streamed.audio)
    plain = run(load_model(path, contract="preview-4"))
    assert not torch.equal(plain.video, resident.video)
    assert {row["op"] for row in resident.report.token_ops} >= {"fp8_linear", "quantise_rows"}
