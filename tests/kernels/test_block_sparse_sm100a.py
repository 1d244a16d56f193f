"""Mirrors kernels/block_sparse_attention/sm100a.py: the translation and the routing, on a stand-in for the package."""

import logging
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.vsa.attention import attention, resolve_ops
from comfyui_fasth3.fasth3_core.vsa.tiles import tile_plan
from comfyui_fasth3.kernels import registry
from comfyui_fasth3.kernels.block_sparse_attention import (
    block_sparse_attention,
    block_sparse_attention_reference,
    sm100a,
)
from comfyui_fasth3.kernels.device import Case
from comfyui_fasth3.kernels.registry import BackendUnavailable, resolve

from .sm100a_stand_in import FakeKernel, counts_of_even_rows, masked_attention
from .vsa_cases import fused, offsets_of, random_lists, relative_error, token_mask_attention

OP, VARIABLE = "block_sparse_attention", "FASTVIDEO_VSA_SM100A"
CASE = Case(device=torch.device("cpu"), dtype=torch.bfloat16)
ODD = [64, 6, 30], [64, 64, 17, 1]
EVEN = [64, 6, 30, 5], [64, 64, 17, 1]
ATOL = 3e-6  # sums of at most 320 products in fp32 against float64


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No switch set, nothing logged or checked before."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(registry, "_LOGGED", set())
    sm100a._self_check_failure.cache_clear()
    yield
    sm100a._self_check_failure.cache_clear()


@pytest.fixture
def absent(monkeypatch):
    """The package is not installed."""
    for name in (sm100a.MODULE, sm100a.INDEX_BUILDER):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def kernel(monkeypatch):
    """The package is installed and this device is of the right generation."""
    fake = FakeKernel()
    monkeypatch.setitem(sys.modules, sm100a.MODULE, fake)
    monkeypatch.setitem(sys.modules, sm100a.INDEX_BUILDER, SimpleNamespace(map_to_index=lambda block_map: None))
    monkeypatch.setattr(sm100a, "capability", lambda device: (10, 0))
    return fake


def make(prefix, video, heads=2, dtype=torch.float32):
    offsets = offsets_of(prefix + video)
    q, k, v = fused(int(offsets[-1]), heads, 128, dtype)
    index, count = random_lists(heads, len(video), len(prefix + video), 4)
    index[0, 1], count[0, 1] = -1, 0
    return q[sum(prefix) :], k, v, offsets, index, count


def translate(*case, **options):
    """The adapter alone, which takes any dtype: in fp32 nothing hides a wrong slot."""
    return sm100a.block_sparse_attention_sm100a(*case, **options)


# translation


@pytest.mark.parametrize("tiles", [EVEN, ODD], ids=["even", "odd"])
def test_matches_a_token_mask(kernel, tiles):
    case = make(*tiles)
    out, expected = translate(*case), token_mask_attention(*case)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=ATOL)
    torch.testing.assert_close(out, block_sparse_attention_reference(*case), rtol=0, atol=ATOL)
    with pytest.raises(AssertionError):  # the tolerance must bite
        torch.testing.assert_close(out.double() * 1.01, expected, rtol=0, atol=ATOL)
    assert (out[64:128, 0] == 0).all(), "an empty list gives exact zeros"


@pytest.mark.parametrize("tiles", [EVEN, ODD], ids=["even", "odd"])
def test_bf16_loses_at_most_twice_what_plain_torch_loses(kernel, tiles):
    q, k, v, *lists = make(*tiles, dtype=torch.bfloat16)
    exact = block_sparse_attention_reference(q.float(), k.float(), v.float(), *lists)
    offsets, index, count = lists
    plain = torch.zeros_like(q)
    for h in range(2):
        for i, (a, b) in enumerate(pairwise([0, *torch.tensor(tiles[1]).cumsum(0).tolist()])):
            tokens = [t for n in index[h, i, : count[h, i]].tolist() for t in range(offsets[n], offsets[n + 1])]
            if tokens:
                plain[a:b, h] = ((q[a:b, h] @ k[tokens, h].T) / 128**0.5).softmax(-1) @ v[tokens, h]
    out = block_sparse_attention(q, k, v, *lists, backend="sm100a")
    loss = relative_error(plain, exact)
    assert relative_error(out, exact) <= 2 * loss
    assert relative_error(out.float() * 1.01, exact) > 2 * loss


@pytest.mark.parametrize("tiles", [EVEN, ODD], ids=["even", "odd"])
def test_what_the_kernel_is_given(kernel, tiles):
    prefix, video = tiles
    q, k, v, offsets, index, count = make(*tiles)
    translate(q, k, v, offsets, index, count)
    (call,) = kernel.calls
    P, N = len(prefix), len(prefix + video)
    assert call.sizes.tolist() == [*prefix, *video, *[0] * (N % 2)]
    assert call.count.tolist() == [[[0] * P + row + [0] * (N % 2) for row in count.tolist()]]
    assert torch.equal(call.index[0, :, P:N], index)
    assert (call.index[0, :, :P] == -1).all() and (call.index[0, :, N:] == -1).all() and (call.index < N).all()
    for name, x, first in (("q", q, P), ("k", k, 0), ("v", v, 0)):
        blocks = getattr(call, name).view(2, -1, 64, 128)
        for n in range(first, N):
            rows = slice(offsets[n] - offsets[first], offsets[n + 1] - offsets[first])
            assert torch.equal(blocks[:, n, : (prefix + video)[n]], x[rows].transpose(0, 1))
        assert torch.count_nonzero(blocks) == torch.count_nonzero(x), "all else is zeros"


@pytest.mark.parametrize(
    ("segments", "grid", "blocks"),
    [((70, 30), (4, 4, 8), 6), ((97, 0, 414), (37, 24, 42), 670), ((300, 0, 414), (37, 24, 42), 672)],
    ids=["small", "odd-prompt", "even-prompt"],
)
def test_a_prompt_of_any_length_takes_the_route(segments, grid, blocks):
    plan = tile_plan(segments, grid, 64)
    slots, sizes = sm100a._layout(plan.offsets, plan.num_tokens)
    assert torch.equal(slots, plan.untile_index()[plan.order])
    assert sizes.dtype == torch.int32 and sizes.tolist() == [*plan.sizes, *[0] * (blocks - len(plan.sizes))]


def test_nothing_outside_a_list_is_read(kernel):
    prefix, video = ODD
    q, k, v, offsets, index, count = make(*ODD, heads=1)
    clean = translate(q, k, v, offsets, index, count)
    for i, (a, b) in enumerate(pairwise([0, *torch.tensor(video).cumsum(0).tolist()])):
        k_bad, v_bad = k.clone(), v.clone()
        for n in set(range(len(prefix + video))) - set(index[0, i, : count[0, i]].tolist()):
            k_bad[offsets[n] : offsets[n + 1]] = v_bad[offsets[n] : offsets[n + 1]] = float("nan")
        assert torch.equal(translate(q, k_bad, v_bad, offsets, index, count)[a:b], clean[a:b])


def test_over_its_queries(kernel):
    q, *rest = make(*ODD, heads=5)
    expected = sm100a.block_sparse_attention_sm100a(q, *rest)
    assert sm100a.block_sparse_attention_sm100a(q, *rest, out=q, byte_budget=1) is q and torch.equal(q, expected)


def test_heads_in_turn_and_a_strided_output(kernel):
    case = make(*ODD, heads=3)
    together = translate(*case)
    whole = torch.full((together.shape[0] + 5, 4, 128), 7.0)
    out = whole[5:, 1:]
    kernel.calls.clear()
    assert translate(*case, out=out, byte_budget=1) is out
    assert len(kernel.calls) == 3 and torch.equal(out, together)
    assert (whole[:5] == 7).all() and (whole[:, 0] == 7).all()


# routing


def assert_in_order(text, *parts):
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), text


def test_a_name_needs_no_switch(kernel):
    assert resolve(OP, "sm100a", CASE).name == "sm100a"


def test_a_named_backend_raises_with_every_reason(absent):
    case = Case(device=torch.device("cpu"), dtype=torch.float32, head_dim=64, tile_size=128, grad=True)
    with pytest.raises(BackendUnavailable) as raised:
        resolve(OP, "sm100a", case)
    assert list(raised.value.refused) == ["sm100a"]
    assert_in_order(
        str(raised.value),
        "block_sparse_attention: backend 'sm100a' cannot run here (sm100a: ",
        "cannot import fastvideo_kernel.block_sparse_attn_sm100a of the package fastvideo-kernel: ModuleNotFound",
        "forward only, but the input requires grad; ",
        "needs an NVIDIA GPU of compute capability 10.0 or 10.3, got cpu; ",
        "needs bf16, got torch.float32; ",
        "needs a head dim of 128, got 64; ",
        "needs tiles of at most 64 tokens, got 128; ",
        "cannot import fastvideo_kernel.triton_kernels.index of the package fastvideo-kernel: ModuleNotFound",
        "Use 'auto' to allow others.",
    )


REFUSALS = {
    "absent": ({}, "cannot import fastvideo_kernel.block_sparse_attn_sm100a of the package fastvideo-kernel: Module"),
    "grad": ({"grad": True}, "forward only, but the input requires grad"),
    "cpu": ({}, "needs an NVIDIA GPU of compute capability 10.0 or 10.3, got cpu"),
    "hopper": ({}, "needs an NVIDIA GPU of compute capability 10.0 or 10.3, got 9.0"),
    "fp16": ({"dtype": torch.float16}, "needs bf16, got torch.float16"),
    "head": ({"head_dim": 64}, "needs a head dim of 128, got 64"),
    "tile": ({"tile_size": 128}, "needs tiles of at most 64 tokens, got 128"),
    "build": ({}, "its is_supported says no: not built for blocks of 64 tokens on compute capability 10.0"),
    "index": ({}, "cannot import fastvideo_kernel.triton_kernels.index of the package fastvideo-kernel: Attribute"),
    "broken": ({}, "cannot run on cpu: RuntimeError: CUDA error: no kernel image"),
    "wrong": ({}, r"cannot run on cpu: RuntimeError: relative error 1.0e-02 on a small case, expected below 0.005"),
    "pairs": ({}, r"cannot run on cpu: RuntimeError: relative error \S+ on a small case"),
}


@pytest.fixture(params=REFUSALS)
def refusal(request, kernel, monkeypatch):
    def no_image(*args):
        raise RuntimeError("CUDA error: no kernel image\n(and a page more)")

    name = request.param
    if name in ("cpu", "hopper"):
        monkeypatch.setattr(sm100a, "capability", lambda device: (9, 0) if name == "hopper" else None)
    elif name == "absent":
        monkeypatch.setitem(sys.modules, sm100a.MODULE, None)
    elif name == "index":
        monkeypatch.setitem(sys.modules, sm100a.INDEX_BUILDER, SimpleNamespace())
    kernel.supported = name != "build"
    kernel.attend = {
        "broken": no_image, "wrong": lambda *args: masked_attention(*args) * 1.01, "pairs": counts_of_even_rows,
    }.get(name, masked_attention)  # fmt: skip
    changes, text = REFUSALS[name]
    return replace(CASE, **changes), text


def test_each_refusal_raises_by_name_and_warns_once_by_auto(refusal, monkeypatch, caplog):
    case, text = refusal
    with pytest.raises(BackendUnavailable, match=rf"backend 'sm100a' cannot run here \(sm100a: {text}"):
        resolve(OP, "sm100a", case)
    assert not caplog.records
    monkeypatch.setenv(VARIABLE, "1")
    with caplog.at_level(logging.WARNING, logger="fasth3.kernels"):
        first, second = (resolve(OP, "auto", case) for _ in range(2))
    assert first.name == second.name != "sm100a" and first.refused["sm100a"] == second.refused["sm100a"]
    warnings = [r.message for r in caplog.records if "sm100a" in r.message]
    assert warnings == [f"{OP}: not using sm100a in spite of {VARIABLE}=1: {first.refused['sm100a']}"]


def test_reasons_come_in_the_order_of_the_checks(kernel, monkeypatch):
    kernel.supported = False
    monkeypatch.setitem(sys.modules, sm100a.INDEX_BUILDER, None)
    case = replace(CASE, grad=True)
    assert_in_order(sm100a.sm100a_why_not(case), "forward only", "its is_supported says no", "triton_kernels.index")
    assert not kernel.calls, "nothing runs where a check has failed"
    monkeypatch.setitem(sys.modules, sm100a.MODULE, None)
    kernel.asked.clear()
    assert_in_order(
        sm100a.sm100a_why_not(case), "block_sparse_attn_sm100a", "forward only", "triton_kernels.index"
    )
    assert not kernel.asked, "a module that cannot be imported is not asked"


def test_is_supported_is_asked_about_what_the_calls_will_be(kernel):
    assert sm100a.sm100a_why_not(CASE) is None
    ((q, sizes),) = kernel.asked
    assert q.shape == (1, 1, 128, 128) and q.dtype == torch.bfloat16 and q.is_contiguous()
    assert sizes.shape == (2,) and sizes.dtype == torch.int32
    assert len(kernel.calls) == 1, "a small case was run"
    assert sm100a.sm100a_why_not(CASE) is None and len(kernel.calls) == 1, "once per device"


@pytest.mark.parametrize("value", [None, "0", "true", ""])
def test_without_the_switch_auto_neither_tries_nor_mentions_it(kernel, monkeypatch, caplog, value):
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with caplog.at_level(logging.DEBUG, logger="fasth3.kernels"):
        chosen = resolve(OP, "auto", CASE)
    assert chosen.name != "sm100a" and "sm100a" not in chosen.refused
    assert not kernel.asked and not kernel.calls and "sm100a" not in caplog.text


def test_with_the_switch_auto_tries_it_first(kernel, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "1")
    chosen = resolve(OP, "auto", CASE)
    assert chosen.name == "sm100a" and not chosen.refused and not caplog.records
    monkeypatch.delenv(VARIABLE)
    assert resolve(OP, "auto", CASE).name != "sm100a", "the environment is read at every decision"


@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_any_input_that_needs_grad_refuses_and_the_next_run_does_not(kernel, monkeypatch, which):
    monkeypatch.setenv(VARIABLE, "1")
    q, k, v, *lists = make(*ODD, dtype=torch.bfloat16)
    inputs = [q, k, v]
    inputs[which] = inputs[which].clone().requires_grad_()
    with pytest.raises(BackendUnavailable, match="requires grad"):
        block_sparse_attention(*inputs, *lists, backend="sm100a")
    block_sparse_attention(*inputs, *lists)
    assert not kernel.calls, "auto took another"
    with torch.no_grad():
        block_sparse_attention(*inputs, *lists)
    block_sparse_attention(q, k, v, *lists)
    assert len(kernel.calls) == 3, "the small case and two calls"


@pytest.mark.parametrize("tile_size", [64, 256])
def test_the_whole_op_takes_the_route(kernel, monkeypatch, tile_size):
    monkeypatch.setenv(VARIABLE, "1")
    plan = tile_plan((70, 30), (4, 8, 9), tile_size)
    inputs = [x.squeeze(1) for x in torch.randn(plan.num_tokens, 4, 2, 128).to(torch.bfloat16).split(1, dim=1)]
    config = VSAConfig(keep_rule="top_k", top_k=1, tile_size=tile_size)
    ops = resolve_ops("auto", Case.of(inputs[0], tile_size))
    out = attention(*inputs, plan, config, ops=ops)
    row = next(row for row in ops.table() if row["op"] == OP)
    assert row == {"op": OP, "backend": "sm100a", "calls": 1, "refused": {}}
    reference = resolve_ops("reference", Case.of(inputs[0], tile_size))
    assert relative_error(out, attention(*inputs, plan, config, ops=reference)) < 5e-3  # the roundings of bf16
    parts = plan.part_offsets.diff().tolist()
    assert kernel.calls[-1].sizes.tolist() == parts + [0] * (len(parts) % 2)


def test_on_the_gpu():
    """The package itself, where there is one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device of compute capability 10.0 or 10.3, and fastvideo-kernel")
    if why := sm100a.sm100a_why_not(Case(device=torch.device("cuda", 0), dtype=torch.bfloat16)):
        pytest.skip(why)
    q, k, v, *lists = (x.to("cuda:0") for x in make(*ODD, dtype=torch.bfloat16))
    out = block_sparse_attention(q, k, v, *lists, backend="sm100a")
    exact = block_sparse_attention_reference(q.float(), k.float(), v.float(), *lists)
    assert relative_error(out, exact) < 5e-3 < relative_error(out.float() * 1.01, exact)
    assert (out[64:128, 0] == 0).all()
