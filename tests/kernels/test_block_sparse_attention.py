"""Mirrors kernels/block_sparse_attention/: each backend against a dense token mask in float64."""

from itertools import pairwise

import pytest
import torch
from comfyui_fasth3.kernels.block_sparse_attention import (
    block_sparse_attention,
    block_sparse_attention_eager,
    block_sparse_attention_reference,
    eager,
)
from comfyui_fasth3.kernels.block_sparse_attention.lists import ListedTokens

from .vsa_cases import fused, offsets_of, random_lists, relative_error, token_mask_attention

PREFIX, VIDEO = [64, 6, 5], [64, 32, 64, 16, 8, 64, 2, 24]
M = sum(VIDEO)
# sums of at most 350 products in fp32 against float64
ATOL = 3e-6


def make(heads=3, dim=16, dtype=torch.float32, prefix=PREFIX, video=VIDEO):
    offsets = offsets_of(prefix + video)
    q, k, v = fused(int(offsets[-1]), heads, dim, dtype)
    index, count = random_lists(heads, len(video), len(prefix) + len(video), 6)
    return q[sum(prefix) :], k, v, offsets, index, count


def with_prefix(index, count, num_prefix):
    """The same lists of video tiles behind the whole prefix."""
    rows = [
        [*range(num_prefix), *(n for n in row[:c].tolist() if n >= num_prefix)]
        for row, c in zip(index.flatten(0, 1), count.flatten(), strict=True)
    ]
    most = max(map(len, rows))
    filled = torch.tensor([row + [-1] * (most - len(row)) for row in rows], dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return filled.view(*count.shape, most), lengths.view(count.shape)


@pytest.fixture
def varlen_on_cpu(monkeypatch):
    """Stand in for torch's CUDA-only kernel with its documented behaviour, and use it here."""

    def varlen_attn(q, k, v, starts_q, starts_k, longest_q, longest_k, *, return_aux):
        assert starts_q.dtype == starts_k.dtype == torch.int32
        assert starts_q[-1] == q.shape[0] and starts_k[-1] == k.shape[0] == v.shape[0]
        out, lse = torch.full_like(q, float("nan")), torch.full((q.shape[1], q.shape[0]), float("nan"))
        for (a, b), (c, d) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
            assert b - a <= longest_q and d - c <= longest_k
            logits = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[c:d].float()) / q.shape[-1] ** 0.5
            out[a:b] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[c:d].float()).to(q.dtype)
            lse[:, a:b] = logits.logsumexp(-1) if d > c else float("inf")
        assert return_aux.lse
        return out, lse

    module = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.10")
    monkeypatch.setattr(module, "varlen_attn", varlen_attn)
    monkeypatch.setattr(eager, "flash_varlen_why_not", lambda *_: None)


PATHS = ["reference", "eager", "varlen"]


@pytest.fixture(params=PATHS)
def backend(request):
    if request.param == "varlen":
        request.getfixturevalue("varlen_on_cpu")
        return "eager"
    return request.param


def assert_close(out, expected):
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=ATOL)
    with pytest.raises(AssertionError):  # the tolerance must bite
        torch.testing.assert_close(out.double() * 1.01, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("budget", [None, 1, 60_000], ids=["whole", "one-list", "some-lists"])
def test_matches_a_token_mask(backend, budget):
    case = make()
    assert_close(block_sparse_attention(*case, byte_budget=budget, backend=backend), token_mask_attention(*case))


@pytest.mark.parametrize("budget", [None, 1, 60_000], ids=["whole", "one-list", "some-lists"])
def test_with_a_prefix_in_every_list(backend, budget):
    *qkv, offsets, index, count = make()
    case = (*qkv, offsets, *with_prefix(index, count + (count == 0), len(PREFIX)))
    assert_close(block_sparse_attention(*case, byte_budget=budget, backend=backend), token_mask_attention(*case))


@pytest.mark.parametrize("prefix", [[], [3]], ids=["no-prefix", "short-prefix"])
@pytest.mark.parametrize("video", [[7], [64, 64, 64], [1, 2, 3]], ids=str)
def test_small_and_even_tilings(backend, prefix, video):
    offsets = offsets_of(prefix + video)
    q, k, v = fused(int(offsets[-1]), 2, 8)
    everything = torch.arange(len(prefix + video), dtype=torch.int32).expand(2, len(video), -1)
    count = torch.full((2, len(video)), len(prefix + video), dtype=torch.int32)
    case = (q[sum(prefix) :], k, v, offsets, everything, count)
    assert_close(block_sparse_attention(*case, backend=backend), token_mask_attention(*case))


def test_zero_counts_are_exact_zeros_and_touch_nothing_else(backend):
    q, k, v, offsets, index, count = make()
    count[1, 2] = count[0, :] = 0
    index[1, 2] = index[0] = -1
    out = block_sparse_attention(q, k, v, offsets, index, count, backend=backend)
    rows = slice(sum(VIDEO[:2]), sum(VIDEO[:3]))
    assert (out[rows, 1] == 0).all() and (out[:, 0] == 0).all()
    assert_close(out, token_mask_attention(q, k, v, offsets, index, count))


def test_nothing_outside_a_list_is_read(backend):
    q, k, v, offsets, index, count = make(heads=1)
    for i in range(len(VIDEO)):
        listed = index[0, i, : count[0, i]].tolist()
        k_bad, v_bad = k.clone(), v.clone()
        for n in set(range(len(PREFIX + VIDEO))) - set(listed):
            k_bad[offsets[n] : offsets[n + 1]] = v_bad[offsets[n] : offsets[n + 1]] = float("nan")
        out = block_sparse_attention(q, k_bad, v_bad, offsets, index, count, backend=backend)
        rows = slice(sum(VIDEO[:i]), sum(VIDEO[: i + 1]))
        assert out[rows].isfinite().all()
        clean = block_sparse_attention(q, k, v, offsets, index, count, backend=backend)
        assert torch.equal(out[rows], clean[rows])


def test_writes_to_a_strided_output(backend):
    q, k, v, offsets, index, count = make()
    whole = torch.full((M + 5, 4, 16), 7.0)
    out = whole[5:, 1:]
    got = block_sparse_attention(q, k, v, offsets, index, count, out=out, backend=backend)
    assert got is out and (whole[:5] == 7).all() and (whole[:, 0] == 7).all()
    assert_close(out, token_mask_attention(q, k, v, offsets, index, count))


@pytest.mark.parametrize("budget", [None, 1, 60_000], ids=["whole", "one-list", "some-lists"])
def test_over_its_queries(backend, budget):
    """Bit for bit what it gives elsewhere, between the keys and values of one projection."""
    q, k, v, offsets, index, count = make()
    expected = block_sparse_attention(q, k, v, offsets, index, count, byte_budget=budget, backend=backend)
    kept = k.clone(), v.clone()
    got = block_sparse_attention(q, k, v, offsets, index, count, out=q, byte_budget=budget, backend=backend)
    assert got is q and torch.equal(q, expected) and torch.equal(k, kept[0]) and torch.equal(v, kept[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ["eager", "varlen"])
def test_low_precision_loses_at_most_twice_what_plain_torch_loses(dtype, path, request):
    q, k, v, offsets, index, count = make(dim=64, dtype=dtype)
    case = (offsets, *with_prefix(index, count + (count == 0), len(PREFIX)))
    exact = block_sparse_attention_reference(q.float(), k.float(), v.float(), *case)
    # plain torch in the dtype: products, softmax and products again, each rounded, one list at a time
    plain = torch.empty_like(q)
    starts = torch.tensor([0, *VIDEO]).cumsum(0).tolist()
    for h in range(q.shape[1]):
        for i, (a, b) in enumerate(pairwise(starts)):
            tiles = case[1][h, i, : case[2][h, i]].tolist()
            tokens = [t for n in tiles for t in range(offsets[n], offsets[n + 1])]
            plain[a:b, h] = ((q[a:b, h] @ k[tokens, h].T) / 64**0.5).softmax(-1) @ v[tokens, h]
    if path == "varlen":
        request.getfixturevalue("varlen_on_cpu")
    got = block_sparse_attention_eager(q, k, v, *case)
    bound = 2 * relative_error(plain, exact)
    assert relative_error(got, exact) <= bound
    assert relative_error(got.float() * 1.01, exact) > relative_error(plain, exact)


def test_shared_prefix_needs_every_list_to_have_it():
    *_, offsets, index, count = make()
    everything = with_prefix(index, count + (count == 0), len(PREFIX))
    videoless = (everything[1] <= len(PREFIX)).any()
    lists = ListedTokens(offsets, *everything, split=True)
    assert lists.shared == (0 if videoless else sum(PREFIX))
    full = torch.arange(len(PREFIX + VIDEO), dtype=torch.int32).expand(3, len(VIDEO), -1).clone()
    count = torch.full((3, len(VIDEO)), full.shape[-1], dtype=torch.int32)
    assert ListedTokens(offsets, full, count, split=True).shared == sum(PREFIX)
    assert ListedTokens(offsets, full, count, split=True).granule == 2
    assert ListedTokens(offsets, full, count, split=False).shared == 0
    full[2, 3] = torch.tensor([*range(1, full.shape[-1]), -1])  # one list without the first prefix tile
    count[2, 3] -= 1
    assert ListedTokens(offsets, full, count, split=True).shared == 0


@pytest.mark.parametrize(("fit", "wave"), [(1, 1), (5, 1), (8, 264), (16, 4), (10**9, 264), (0, 2)])
def test_batches_cover_every_list_once_within_the_budget(fit, wave):
    *_, offsets, index, count = make(heads=7)
    seen = torch.zeros(7, len(VIDEO), dtype=torch.int)
    for heads, tiles in ListedTokens(offsets, index, count, split=False).batches(fit, wave):
        assert seen[heads, tiles].numel() <= max(1, fit)
        seen[heads, tiles] += 1
    assert (seen == 1).all()


def test_batches_fill_the_device():
    """660 query tiles in 264-list rounds: two heads x 132 leave nothing idle, one head x 220 a sixth."""
    offsets = offsets_of([64] * 660)
    index = torch.zeros(56, 660, 1, dtype=torch.int32)
    lists = ListedTokens(offsets, index, torch.ones(56, 660, dtype=torch.int32), split=False)
    assert lists.batches(264, 264)[0] == (slice(0, 2), slice(0, 132))
