"""Mirrors fasth3_core/model/ops.py: the choice, and a whole forward on it."""

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.weight import AdaptedWeight, Increment
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.contracts import CONTRACTS
from comfyui_fasth3.fasth3_core.model import blocks, dit
from comfyui_fasth3.fasth3_core.model.handle import H3Model
from comfyui_fasth3.fasth3_core.model.linear import linear
from comfyui_fasth3.fasth3_core.model.ops import resolve_token_ops
from comfyui_fasth3.fasth3_core.packing.layout import build_layout
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.request import Request
from comfyui_fasth3.fasth3_core.weights.fp8 import to_fp8
from comfyui_fasth3.kernels.device import INTERPRET, Case
from comfyui_fasth3.kernels.registry import BackendUnavailable
from comfyui_fasth3.kernels.segments import Segments

from .checkpoints import quantise
from .tiny import TEXT_DIM, tiny_store

CPU = Case(device=torch.device("cpu"), dtype=torch.float32)


def forward(backend: str, device: str, pass_rows: int = 8):
    """Velocities of a tiny request of 21 tokens, and what ran."""
    torch.manual_seed(1)
    store = tiny_store(device=device)
    layout = build_layout(torch.ones(3, dtype=torch.long), 2, 4, 4, 5)
    ops = resolve_token_ops(backend, Case(device=torch.device(device), dtype=store.dtype))
    step = dit.step_rows(layout, 0.3, 0.1, 1.0)
    text, video, audio = torch.randn(3, TEXT_DIM), torch.randn(8, 96, device=device), torch.randn(10, 32, device=device)
    with torch.inference_mode():
        prepared = dit.prepare(
            store, layout, None, text, [], [step], torch.device(device), ops, lambda: None, use_gates=False
        )
        out = dit.velocity(
            store, prepared, 0, video, audio, lambda step, block: blocks.dense_attention, lambda: None,
            pass_rows=pass_rows,
        )
    return out, {row["op"]: (row["backend"], row["calls"]) for row in ops.table()}


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_forward_on_each_is_that_on_the_reference(backend, request):
    device = request.getfixturevalue("triton_device") if backend == "triton" else "cpu"
    truth, _ = forward("reference", device)
    out, ran = forward(backend, device)
    assert ran == {
        "rms_modulate": (backend, 6),  # three passes of each main block
        "residual_rms_modulate": (backend, 2),
        "gated_residual": (backend, 6),
        "qk_norm_rope": (backend, 2),
        "swiglu": (backend, 2 + 6),  # the text refiner's two blocks, too
    }
    for a, b in zip(out, truth, strict=True):
        error = ((a - b).norm() / b.norm()).item()
        assert error <= 2e-6  # a few dozen fp32 operations in another order


@pytest.mark.parametrize("pass_rows", [1, 20, 21])
def test_passes_change_the_order_of_additions_at_most(pass_rows):
    whole, _ = forward("eager", "cpu", blocks.PASS_ROWS)
    for a, b in zip(forward("eager", "cpu", pass_rows)[0], whole, strict=True):
        assert ((a - b).norm() / b.norm()).item() <= 1e-6
        assert ((a * 1.01 - b).norm() / b.norm()).item() > 1e-6


def increments(weight):
    return AdaptedWeight(weight, (Increment(torch.randn(3, 32), torch.randn(16, 3), 0.5, 8),))


FORMS = {
    "plain": lambda weight: weight,
    "fp8": to_fp8,
    "int8": partial(quantise, group=16),
    "float8 file": lambda weight: QuantizedWeight(weight.to(torch.float8_e4m3fn), torch.ones(48, 1), "float8_e4m3fn"),
    "adapted": increments,
    "adapted int8": lambda weight: increments(quantise(weight, 16)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_product_into_rows_of_its_result(form, backend):
    weight, x, ops = FORMS[form](torch.randn(48, 32)), torch.randn(5, 32), resolve_token_ops(backend, CPU)
    result = torch.full((9, 48), torch.nan)
    made = linear(x, weight, ops=ops, out=result[2:7])
    assert made.data_ptr() == result[2:7].data_ptr() and result[[0, 1, 7, 8]].isnan().all()
    assert torch.equal(result[2:7], linear(x, weight, ops=ops))


def test_a_block_keeps_nothing_that_it_is_done_with(monkeypatch):
    """The normed tokens are gone while the attention runs, the gate is when its result is projected."""
    store = tiny_store(gates=True)
    layout = build_layout(torch.ones(3, dtype=torch.long), 2, 4, 4, 5)
    ops = resolve_token_ops("eager", CPU)
    step = dit.step_rows(layout, 0.3, 0.1, 1.0)
    made = {}

    def kept(name, function):
        def call(*args, **kwargs):
            out = function(*args, **kwargs)
            made.setdefault(name, weakref.ref(out))
            return out

        return call

    def attend(q, k, v, gate):
        assert made["normed"]() is None
        made["gate"] = weakref.ref(gate)
        return blocks.dense_attention(q, k, v)

    def product(x, weight, *args, **kwargs):
        if weight is out_weight:
            assert made["gate"]() is None
        return linear(x, weight, *args, **kwargs)

    out_weight, linear = store.block(0)["attn.out_proj.weight"], blocks.linear
    monkeypatch.setattr(blocks, "linear", product)
    with torch.inference_mode():
        prepared = dit.prepare(
            store, layout, None, torch.randn(3, TEXT_DIM), [], [step], CPU.device, ops, lambda: None, use_gates=True
        )
        counted = replace(ops, rms_modulate=kept("normed", ops.rms_modulate))
        blocks.main_block(
            torch.randn(layout.num_tokens, store.config.hidden_size), store.block(0), store.config, counted,
            prepared.tables[0][0], Segments.of(step.segments, "cpu"), prepared.rope, attend, True, lambda: None,
        )
    assert made["gate"]() is None


@pytest.mark.skipif(INTERPRET or torch.cuda.is_available(), reason="here Triton can run")
def test_a_named_backend_runs_or_raises():
    assert {row["backend"] for row in resolve_token_ops("reference", CPU).table()} == {"reference"}
    with pytest.raises(BackendUnavailable, match=r"rms_modulate: backend 'triton' cannot run here \(triton: "):
        resolve_token_ops("triton", CPU)


def test_a_backend_of_attention_alone_leaves_the_choice():
    chosen = [[row["backend"] for row in resolve_token_ops(name, CPU).table()] for name in ("hopper", "auto")]
    assert chosen[0] == chosen[1]


def test_a_run_follows_the_named_backend_and_reports_it():
    store = tiny_store()
    model = H3Model(store.config, CONTRACTS["preview-4"], store, "tiny")
    request = Request(
        text_states=torch.randn(1, 3, TEXT_DIM), latent_frames=7, latent_height=4, latent_width=4, audio_latents=37
    )
    report = sample(model, request, device="cpu", vsa=VSAConfig(backend="eager")).report
    assert {row["op"]: row["calls"] for row in report.token_ops}["residual_rms_modulate"] == 4 * 2
    assert "token-wise operations: eager" in report.to_text()
