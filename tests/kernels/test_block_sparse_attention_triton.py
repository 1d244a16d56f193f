"""Mirrors kernels/block_sparse_attention/triton_kernel.py: on a GPU, or in Triton's interpreter."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.vsa.attention import attention, resolve_ops
from comfyui_fasth3.fasth3_core.vsa.tiles import tile_plan
from comfyui_fasth3.kernels.block_sparse_attention import (
    block_sparse_attention,
    block_sparse_attention_reference,
    portable_why_not,
)
from comfyui_fasth3.kernels.device import Case

from .vsa_cases import fused, offsets_of, random_lists, relative_error

kernel = pytest.importorskip(
    "comfyui_fasth3.kernels.block_sparse_attention.triton_kernel", reason="triton is not installed"
)
steps = pytest.importorskip("comfyui_fasth3.kernels.block_sparse_attention.steps", reason="triton is not installed")

PREFIX, VIDEO = [64, 30], [64, 33, 8, 64, 2, 48]
SIZES = PREFIX + VIDEO
FIRST = sum(PREFIX)


@pytest.fixture(params=[False, True], ids=["pointers", "descriptors"])
def launch(request, triton_device):
    if request.param and triton_device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU that copies by descriptor")
    return kernel.Launch(descriptors=request.param, stages=2, granule_stages=2)


def make(device, heads=2, dim=64, dtype=torch.float16):
    offsets = offsets_of(SIZES)
    q, k, v = fused(int(offsets[-1]), heads, dim, dtype)[0:3]
    index, count = random_lists(heads, len(VIDEO), len(SIZES), 6)
    index[0, 1], count[0, 1] = torch.tensor([0, 2, 5, -1, -1, -1]), 3  # full tiles alone
    index[0, 2], count[0, 2] = torch.tensor([1, 3, 4, 6, 7, -1]), 5  # ragged tiles alone
    return [x.to(device) for x in (q[FIRST:], k, v, offsets, index, count)]


def run(case, launch, out=None):
    return kernel.attend(*case, out, launch)


def plain(q, k, v, offsets, index, count):
    """Plain torch in the inputs' dtype: product, softmax and product again, each rounded, one list at a time."""
    out, bounds = torch.zeros_like(q), offsets.tolist()
    for h in range(q.shape[1]):
        for i, (a, b) in enumerate(pairwise(n - FIRST for n in bounds[len(PREFIX) :])):
            tokens = [t for n in index[h, i, : count[h, i]].tolist() for t in range(bounds[n], bounds[n + 1])]
            if tokens:
                logits = q[a:b, h] @ k[tokens, h].T / q.shape[-1] ** 0.5
                out[a:b, h] = logits.softmax(-1) @ v[tokens, h]
    return out


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_loses_no_more_than_plain_torch(dtype, dim, launch, triton_device):
    case = make(triton_device, dim=dim, dtype=dtype)
    q, k, v, *lists = case
    exact = block_sparse_attention_reference(q.float(), k.float(), v.float(), *lists)
    bound = relative_error(plain(*case), exact)  # about twice the loss of rounding probabilities and result alone
    out = run(case, launch)
    assert relative_error(out, exact) <= bound
    assert relative_error(out.float() * 1.01, exact) > bound


def test_nothing_outside_a_list_is_read_and_neighbours_do_not_leak(launch, triton_device):
    q, k, v, *lists = make(triton_device, heads=1)
    offsets, index, count = lists
    clean = run((q, k, v, *lists), launch)
    for i in (1, 2):
        listed = index[0, i, : count[0, i]].tolist()
        q_bad, k_bad, v_bad = q.clone(), k.clone(), v.clone()
        rows = slice(offsets[len(PREFIX) + i] - FIRST, offsets[len(PREFIX) + i + 1] - FIRST)
        q_bad[: rows.start], q_bad[rows.stop :] = float("nan"), float("nan")
        for n in set(range(len(SIZES))) - set(listed):
            k_bad[offsets[n] : offsets[n + 1]] = v_bad[offsets[n] : offsets[n + 1]] = float("nan")
        out = run((q_bad, k_bad, v_bad, *lists), launch)
        assert torch.equal(out[rows], clean[rows]) and out[rows].isfinite().all()
        assert out.isnan().any(), "the poison must reach the rows that list it"


def test_zero_counts_are_exact_zeros_in_a_strided_output(launch, triton_device):
    q, k, v, offsets, index, count = make(triton_device)
    count[0, 3] = count[1] = 0
    whole = torch.full((q.shape[0] + 3, 3, 64), 7.0, dtype=q.dtype, device=triton_device)
    out = whole[3:, 1:]
    assert run((q, k, v, offsets, index, count), launch, out) is out
    assert (whole[:3] == 7).all() and (whole[:, 0] == 7).all()
    rows = slice(sum(VIDEO[:3]), sum(VIDEO[:4]))
    assert (out[rows, 0] == 0).all() and (out[:, 1] == 0).all() and (out[: rows.start, 0] != 0).all()
    case = (q, k, v, offsets, index, count)
    exact = block_sparse_attention_reference(q.float(), k.float(), v.float(), *case[3:])
    assert relative_error(out, exact) <= relative_error(plain(*case), exact)


def test_over_its_queries(launch, triton_device):
    q, *rest = make(triton_device)
    expected = run((q, *rest), launch)
    assert run((q, *rest), launch, q) is q and torch.equal(q, expected)


@pytest.mark.parametrize("layout", ["head-major", "odd-address", "expanded-lists"])
def test_layouts_that_descriptors_cannot_take_give_the_same(layout, launch, triton_device):
    q, k, v, offsets, index, count = make(triton_device)
    if layout == "expanded-lists":
        index, count = index[:1].expand_as(index), count[:1].expand_as(count)
    expected = run((q, k, v, offsets, index.contiguous(), count.contiguous()), launch)
    if layout == "head-major":
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    elif layout == "odd-address":
        buffer = torch.empty(k.numel() + 1, dtype=k.dtype, device=triton_device)[1:]
        k = buffer.view(k.shape).copy_(k)
    torch.testing.assert_close(run((q, k, v, offsets, index, count), launch), expected, rtol=0, atol=2e-3)


def test_more_tokens_than_a_granule_can_number(triton_device):
    lists = torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="134217729 tokens, expected at most 134217728"):
        steps.pack_lists(offsets_of([1]), lists, lists[0], (1 << 27) + 1)


@pytest.mark.parametrize("tile_size", [128, 256])
def test_larger_tiles_are_attended_in_parts(tile_size, triton_device):
    plan = tile_plan((70,), (5, 9, 10), tile_size, triton_device)
    q, k, v, gate = torch.randn(4, plan.num_tokens, 1, 64, device=triton_device).half()
    config = VSAConfig(keep_rule="sparsity", sparsity=0.7, tile_size=tile_size, backend="triton")
    ops = resolve_ops("triton", Case.of(q, tile_size))
    assert {row["backend"] for row in ops.table()} == {"triton", "eager"} and not ops.whole_tiles
    assert resolve_ops("eager", Case.of(q, tile_size)).whole_tiles
    out = attention(q, k, v, gate, plan, config, ops=ops)
    wide = [x.float() for x in (q, k, v, gate)]
    exact = attention(*wide, plan, replace(config, backend="reference"))
    assert relative_error(out, exact) <= 1e-3  # 2**-11 of each rounding: probabilities, result, branch, sum
    assert relative_error(out.float() * 1.01, exact) > 1e-3
    assert torch.equal(attention(q, k, v, gate, plan, config, ops=ops, in_place=True), out)


def test_named_reasons(triton_device):
    def case(**change):
        base = {"device": torch.device(triton_device), "dtype": torch.float16, "head_dim": 128}
        return Case(**base | change)

    assert portable_why_not(case()) is None and portable_why_not(case(head_dim=64)) is None
    assert portable_why_not(case(dtype=torch.float32)) == "needs bf16 or fp16, got torch.float32"
    assert portable_why_not(case(head_dim=80)) == "needs a head dim of 64 or 128, got 80"
    assert portable_why_not(case(tile_size=256)) == "needs tiles of at most 64 tokens, got 256"
    assert "requires grad" in portable_why_not(case(grad=True))
    assert "stride 1" in portable_why_not(case(contiguous=False))


def test_strides_that_the_kernel_cannot_take(launch, triton_device):
    q, k, v, *lists = make(triton_device)
    with pytest.raises(ValueError, match=r"block_sparse_attention: k .* the last must be 1"):
        run((q, k.transpose(1, 2).contiguous().transpose(1, 2), v, *lists), launch)


@pytest.mark.parametrize(
    ("capability", "row"),
    [((7, 5), (7, 5)), ((8, 0), (8, 0)), ((8, 9), (8, 0)), ((9, 0), (9, 0)), ((10, 3), (10, 0)), ((12, 1), (12, 0))],
    ids=str,
)
def test_every_generation_has_a_launch(capability, row):
    assert kernel.launch_for(capability) is kernel._LAUNCHES[row]


def test_is_what_a_named_backend_runs(triton_device):
    case = make(triton_device, heads=1)
    capability = torch.cuda.get_device_capability() if triton_device == "cuda" else (7, 5)
    expected = run(case, kernel.launch_for(capability))
    assert torch.equal(block_sparse_attention(*case, backend="triton"), expected)
