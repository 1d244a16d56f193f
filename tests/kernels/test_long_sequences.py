"""Sequences of 120,000 tokens, whose fused projection passes 2^31 elements: some rows against fp32, on a large GPU."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.vsa.attention import attention, resolve_ops
from comfyui_fasth3.fasth3_core.vsa.selection import pooled_scores
from comfyui_fasth3.fasth3_core.vsa.tiles import tile_plan
from comfyui_fasth3.kernels.block_sparse_attention import block_sparse_attention
from comfyui_fasth3.kernels.device import Case
from comfyui_fasth3.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from comfyui_fasth3.kernels.registry import BackendUnavailable, resolve
from comfyui_fasth3.kernels.tile_mean import tile_mean

from .vsa_cases import relative_error

H, D, KEPT = 56, 128, 200


@pytest.fixture(scope="module")
def case():
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs a GPU with 24 GiB")
    plan = tile_plan((250, 801), (119, 24, 42), 64, "cuda")
    assert plan.num_tokens >= 120_000 and plan.num_tokens * 3 * H * D > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (plan.num_tokens, 3, H, D)
    q, k, v = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).unbind(1)
    P, V = plan.num_prefix_tiles, plan.num_video_tiles
    best = torch.rand(H, V, V, device="cuda", generator=generator).topk(KEPT).indices.sort().values + P
    index = torch.cat([torch.arange(P, device="cuda").expand(H, V, P), best], dim=-1).int()
    return plan, q, k, v, index, torch.full((H, V), P + KEPT, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_rows_of_the_sparse_op(case, backend):
    plan, q, k, v, index, count = case
    try:
        resolve("block_sparse_attention", backend, Case.of(q))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    P, V, bounds = plan.num_prefix_tiles, plan.num_video_tiles, plan.offsets.tolist()
    out = block_sparse_attention(q[plan.prefix_len :], k, v, plan.offsets, index, count, backend=backend)
    assert not bool(out.isnan().any())
    ragged = [i for i in range(V) if plan.sizes[P + i] < 64]
    for h in (0, H // 2, H - 1):
        for i in (0, ragged[0], V // 2, ragged[-1], V - 1):
            tokens = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in index[h, i].tolist()]).cuda()
            rows = slice(bounds[P + i], bounds[P + i + 1])
            logits = q[rows, h].float() @ k[tokens, h].float().T / D**0.5
            exact = logits.softmax(-1) @ v[tokens, h].float()
            found = out[rows.start - plan.prefix_len : rows.stop - plan.prefix_len, h]
            assert relative_error(found, exact) <= 5e-3 < relative_error(found.float() * 1.01, exact)


def test_rows_of_tile_means(case):
    plan, _, _, v, _, _ = case
    means = tile_mean(v, plan.offsets, 64)
    for n in (0, len(plan.sizes) // 2, len(plan.sizes) - 1):
        a, b = plan.offsets[n : n + 2].tolist()
        torch.testing.assert_close(means[:, n], v[a:b].float().mean(0), rtol=0, atol=1e-5)


def test_rows_of_the_whole_op(case):
    """Selection, attention, coarse branch: what a row should be by its tile's scores."""
    plan, q, k, v, _, _ = case
    gate = torch.randn(q.shape, device=q.device, dtype=q.dtype)
    config = VSAConfig(keep_rule="top_k", top_k=KEPT, tile_size=64)
    ops = resolve_ops("auto", Case.of(q, 64))
    out = attention(q, k, v, gate, plan, config, ops=ops)
    assert bool(out.isfinite().all())
    P, V, bounds = plan.num_prefix_tiles, plan.num_video_tiles, plan.offsets.tolist()
    q_mean, k_mean, v_mean = (ops.tile_mean(x, plan.offsets, 64) for x in (q, k, v))
    for h in (0, H - 1):
        scores = pooled_scores(q_mean[h : h + 1], k_mean[h : h + 1])[0]
        for n in (0, P - 1, P, P + V // 2, P + V - 1):
            video = scores[n, P:].sort(descending=True, stable=True).indices[: V if n < P else KEPT].sort().values
            tiles = [*range(P), *(P + video).tolist()]
            tokens = torch.cat([torch.arange(bounds[j], bounds[j + 1]) for j in tiles]).to(q.device)
            rows = slice(bounds[n], bounds[n + 1])
            logits = q[rows, h].float() @ k[tokens, h].float().T / D**0.5
            coarse = scores[n].softmax(-1) @ v_mean[h]
            exact = logits.softmax(-1) @ v[tokens, h].float() + coarse * gate[rows, h].float()
            assert relative_error(out[rows, h], exact) <= 5e-3 < relative_error(out[rows, h].float() * 1.01, exact)


def test_rows_of_qk_norm_rope(case):
    plan, q, k, _, _, _ = case
    weights = 1 + torch.rand(2, D, device=q.device, dtype=q.dtype)
    angles = torch.rand(plan.num_tokens, 48, device=q.device) * 6
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    rows = torch.tensor([0, plan.num_tokens // 2, plan.num_tokens - 1], device=q.device)
    expected = q[rows].float(), k[rows].float()
    qk_norm_rope_reference(*expected, *weights, cos[rows], sin[rows], 1e-5)
    qk_norm_rope(q, k, *weights, cos, sin, 1e-5)
    for got, exact in zip((q[rows], k[rows]), expected, strict=True):
        assert relative_error(got, exact) <= 3e-3 < relative_error(got.float() * 1.01, exact)
