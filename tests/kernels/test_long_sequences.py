"""Sequences whose fused projection passes 2^31 elements: some rows against fp32. Needs 16 GiB of a GPU."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.vsa.tiles import tile_plan
from comfyui_fasth3.kernels.block_sparse_attention import block_sparse_attention
from comfyui_fasth3.kernels.device import Case
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
