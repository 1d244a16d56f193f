"""Mirrors fasth3_core/vsa/attention.py: recorded values, dense limits, and what a run may configure."""

import json

import pytest
import torch
import torch.nn.functional as F
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.vsa import attention as module
from comfyui_fasth3.fasth3_core.vsa.attention import attention, resolve_ops
from comfyui_fasth3.fasth3_core.vsa.selection import pooled_scores
from comfyui_fasth3.fasth3_core.vsa.tiles import tile_plan
from comfyui_fasth3.kernels.device import Case
from comfyui_fasth3.kernels.registry import BackendUnavailable
from comfyui_fasth3.kernels.tile_mean import tile_mean_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

BACKENDS = ["reference", "eager"]
TINY64 = ((70, 5, 130), (9, 10, 13), 64)
TINY = ((7, 5, 3), (8, 4, 6), 256)
# fp32 sums in another order than a plain softmax over the untiled sequence
ATOL = 1e-5


def config(sparsity, *, tile_size=64, mode="exempt", backend="eager", **more):
    more = {"keep_rule": "sparsity", "sparsity": sparsity} | more
    return VSAConfig(tile_size=tile_size, mode=mode, backend=backend, **more)


def packed(tokens, heads=2, dim=8, dtype=torch.float32):
    """q, k, v, gate in packed order."""
    return torch.randn(4, tokens, heads, dim).to(dtype)


def dense(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)


def run(plan, config, q, k, v, gate=None, **kwargs):
    """`attention` on packed inputs; the result in packed order."""
    ordered = [None if x is None else x[plan.order] for x in (q, k, v, gate)]
    return attention(*ordered, plan, config, **kwargs)[plan.inverse]


def golden(golden_dir, i):
    with safe_open(golden_dir / "vsa_op.safetensors", "pt") as file:
        case = json.loads(file.metadata()["cases"])[i]
        keys = [k for k in file.keys() if k.startswith(f"{i}.")]  # noqa: SIM118 - a file handle, not a dict
        return case, {key.split(".")[1]: file.get_tensor(key) for key in keys}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("i", range(7))
def test_recorded_values(golden_dir, i, backend):
    case, t = golden(golden_dir, i)
    grid = tuple(n // p for n, p in zip(case["latent_grid"], case["patch"], strict=True))
    plan = tile_plan(tuple(case["prefix_segments"]), grid, case["tile_size"])
    assert torch.equal(plan.tile_sizes(), t["tile_sizes"])
    assert torch.equal(plan.untile_index(), t["untile_index"])
    assert (plan.num_prefix_tiles, plan.num_video_tiles) == (case["prefix_tiles"], case["video_tiles"])
    q, k, v, gate = (t[n].float()[0] if n in t else None for n in ("q", "k", "v", "gate"))
    assert (gate is not None) == case["gate"]
    settings = config(case["sparsity"], tile_size=case["tile_size"], mode=case["mode"], backend=backend)
    out = run(plan, settings, q, k, v, gate)
    torch.testing.assert_close(out, t["out"][0], rtol=0, atol=3e-6)
    with pytest.raises(AssertionError):  # the tolerance must bite
        torch.testing.assert_close(out * 1.01, t["out"][0], rtol=0, atol=3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("geometry", [TINY64, TINY], ids=["TINY64", "TINY"])
@pytest.mark.parametrize("mode", ["exempt", "compete"])
def test_prefix_rows_are_dense_and_video_rows_are_not(geometry, mode, backend):
    plan = tile_plan(*geometry)
    q, k, v, _ = packed(plan.num_tokens)
    out = run(plan, config(0.75, tile_size=geometry[2], mode=mode, backend=backend), q, k, v)
    expected, P = dense(q, k, v), plan.prefix_len
    torch.testing.assert_close(out[:P], expected[:P], rtol=0, atol=ATOL)
    assert ((out[P:] - expected[P:]).abs().amax((1, 2)) > ATOL).all()


@settings(max_examples=25, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(1, 20)),
    segments=st.lists(st.integers(0, 130), max_size=3).map(tuple),
    tile_size=st.sampled_from([64, 128, 256]),
    sparsity=st.sampled_from([0.0, 0.5, 0.9]),
    mode=st.sampled_from(["exempt", "compete"]),
)
def test_any_geometry(grid, segments, tile_size, sparsity, mode):
    plan = tile_plan(segments, grid, tile_size)
    q, k, v, gate = packed(plan.num_tokens, heads=1)
    settings = config(sparsity, tile_size=tile_size, mode=mode)
    out, expected = run(plan, settings, q, k, v), dense(q, k, v)
    rows = plan.prefix_len if settings.kept_tiles(plan.num_video_tiles) < plan.num_video_tiles else plan.num_tokens
    torch.testing.assert_close(out[:rows], expected[:rows], rtol=0, atol=ATOL)
    # the gate adds its branch to every row, whatever is kept
    sizes = plan.tile_sizes()
    means = [tile_mean_reference(x[plan.order], plan.offsets, tile_size) for x in (q, k, v)]
    coarse = (pooled_scores(means[0], means[1]).softmax(-1) @ means[2]).transpose(0, 1).repeat_interleave(sizes, dim=0)
    gated = run(plan, settings, q, k, v, gate)
    torch.testing.assert_close(gated, out + coarse[plan.inverse] * gate, rtol=0, atol=ATOL)


@pytest.mark.parametrize("mode", ["exempt", "compete"])
def test_backends_agree_on_many_heads_in_groups(mode, monkeypatch):
    plan = tile_plan(*TINY64)
    ordered = packed(plan.num_tokens, heads=5, dim=16)[:, plan.order]
    whole = attention(*ordered, plan, config(0.8, mode=mode, backend="reference"))
    monkeypatch.setattr(module, "SCORE_BYTES", 2 * 4 * len(plan.sizes) ** 2)
    out = attention(*ordered, plan, config(0.8, mode=mode), byte_budget=100_000)
    torch.testing.assert_close(out, whole, rtol=0, atol=3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_one_projection_are_fine(backend):
    plan = tile_plan(*TINY64)
    qkvg = torch.randn(plan.num_tokens, 4, 2, 16)
    settings = config(0.9, backend=backend)
    out = attention(*qkvg.unbind(1), plan, settings)
    assert torch.equal(out, attention(*(x.contiguous() for x in qkvg.unbind(1)), plan, settings))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("geometry", [TINY64, TINY], ids=["TINY64", "TINY"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("sparsity", [0.0, 0.75], ids=["dense", "sparse"])
def test_over_its_queries(geometry, gated, sparsity, backend, monkeypatch):
    """Bit for bit the result that a tensor of its own holds; k, v and the gate stay."""
    plan, settings = tile_plan(*geometry), config(sparsity, tile_size=geometry[2], backend=backend)
    monkeypatch.setattr(module, "SCORE_BYTES", 2 * 4 * len(plan.sizes) ** 2)  # two heads at a time
    qkvg = torch.randn(plan.num_tokens, 4, 3, 16)
    expected = attention(*qkvg[:, :3].unbind(1), qkvg[:, 3] if gated else None, plan, settings)
    kept = qkvg.clone()
    q, k, v, gate = qkvg.unbind(1)
    assert attention(q, k, v, gate if gated else None, plan, settings, in_place=True) is q
    assert torch.equal(q, expected) and torch.equal(qkvg[:, 1:], kept[:, 1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_loses_at_most_twice_what_plain_torch_loses(dtype):
    """Tile means are fp32 in both, so the lists are equal and only the products round."""
    plan = tile_plan(*TINY64)
    inputs = packed(plan.num_tokens, dim=64, dtype=dtype)[:, plan.order]
    exact = attention(*(x.float() for x in inputs), plan, config(0.8, backend="reference"))
    # plain torch in the dtype: dense rows and coarse branch as here, sparse rows under a dense token mask
    q, k, v, gate = inputs
    plain = dense(q, k, v)
    means = [tile_mean_reference(x, plan.offsets, 64) for x in (q, k, v)]
    scores = pooled_scores(means[0], means[1])
    P, V = plan.num_prefix_tiles, plan.num_video_tiles
    kept = scores[:, P:, P:].topk(config(0.8).kept_tiles(V), dim=-1).indices + P
    mask = torch.zeros_like(scores[:, P:], dtype=torch.bool).scatter_(-1, kept, True)
    mask[..., :P] = True
    tile_of = torch.repeat_interleave(plan.tile_sizes())
    tokens = mask[:, tile_of[plan.prefix_len :] - P][:, :, tile_of]
    sparse = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q[plan.prefix_len :], k, v)), attn_mask=tokens
    )
    plain[plan.prefix_len :] = sparse.transpose(0, 1)
    plain += (scores.softmax(-1) @ means[2]).to(dtype).transpose(0, 1)[tile_of] * gate

    def error(x):
        return ((x.float() - exact).norm() / exact.norm()).item()

    out = attention(*inputs, plan, config(0.8))
    assert error(out) <= 2 * error(plain) < error(out * 1.01)


@pytest.mark.parametrize(
    ("settings", "step", "layer"),
    [
        (config(0.0), 0, 0),
        (config(0.9, dense_first_steps=2), 1, 7),
        (config(0.9, dense_layers=(3,)), 5, 3),
        (config(0.9, keep_rule="top_k", top_k=10**6), 0, 0),
    ],
    ids=["sparsity-0", "first-steps", "layer", "top-k"],
)
def test_dense_settings_skip_the_scores(settings, step, layer, monkeypatch):
    plan = tile_plan(*TINY64)
    q, k, v, gate = packed(plan.num_tokens)
    torch.testing.assert_close(
        run(plan, settings, q, k, v, gate, step=step, layer=layer) - run(plan, config(0.0), q, k, v, gate),
        torch.zeros_like(q), rtol=0, atol=ATOL,
    )
    monkeypatch.setattr(module, "pooled_scores", None)
    out = run(plan, settings, q, k, v, step=step, layer=layer)
    torch.testing.assert_close(out, dense(q, k, v), rtol=0, atol=ATOL)


def test_top_k_keeps_that_many():
    plan = tile_plan(*TINY64)
    q, k, v, _ = packed(plan.num_tokens)
    kept = config(0.9).kept_tiles(plan.num_video_tiles)
    assert torch.equal(
        run(plan, config(0.9), q, k, v), run(plan, config(0.0, keep_rule="top_k", top_k=kept), q, k, v)
    )


def test_a_run_decides_once_and_counts():
    plan = tile_plan(*TINY64)
    q, k, v, gate = packed(plan.num_tokens)
    ops = resolve_ops("auto", Case.of(q))
    for layer in range(3):
        run(plan, config(0.9), q, k, v, gate, ops=ops, layer=layer)
    run(plan, config(0.0), q, k, v, ops=ops)
    calls = {row["op"]: row["calls"] for row in ops.table()}
    assert calls == {
        "tile_mean": 9, "tile_topk": 3, "block_sparse_attention": 3, "coarse_branch": 3, "dense_attention": 4,
    }
    assert resolve_ops("auto", Case.of(q)).block_sparse_attention.calls == 0


def test_a_named_backend_is_used_where_it_exists():
    case = Case(device=torch.device("cpu"), dtype=torch.float32)
    assert {row["backend"] for row in resolve_ops("reference", case).table()} == {"reference"}
    assert resolve_ops("eager", case).block_sparse_attention.name == "eager"
    with pytest.raises(BackendUnavailable, match=r"backend 'sage' cannot run here .*unknown; block_sparse_"):
        resolve_ops("sage", case)
