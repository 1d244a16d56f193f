"""Mirrors kernels/coarse_branch/."""

from itertools import pairwise

import pytest
import torch
from comfyui_fasth3.kernels.coarse_branch import coarse_branch, coarse_branch_reference, eager

from .vsa_cases import offsets_of, relative_error

SIZES = [64, 6, 5, 64, 33]


def make(dtype):
    S, N, H, D = sum(SIZES), len(SIZES), 3, 16
    gate = torch.randn(S, 4, H, D).to(dtype)[:, 3]
    return torch.randn(S, H, D).to(dtype), torch.randn(H, N, N) * 3, torch.randn(H, N, D), gate, offsets_of(SIZES)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_is_the_gated_softmax_of_tile_means(backend):
    out, scores, v_mean, gate, offsets = make(torch.float32)
    expected = out.double()
    for n, (a, b) in enumerate(pairwise(offsets)):
        coarse = torch.einsum("hn,hnd->hd", scores[:, n].double().softmax(-1), v_mean.double())
        expected[a:b] += coarse * gate[a:b].double()
    got = coarse_branch(out, scores, v_mean, gate, offsets, backend=backend)
    assert got is out
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    with pytest.raises(AssertionError):  # the tolerance must bite
        torch.testing.assert_close(got.double() * 1.01, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_one_rounding_of_each_factor(dtype, monkeypatch):
    out, scores, v_mean, gate, offsets = make(dtype)
    monkeypatch.setattr(eager, "_BYTES", 7 * 3 * 16 * 2)  # many passes
    exact = coarse_branch_reference(out.float(), scores, v_mean, gate.float(), offsets)
    plain = out + coarse_branch_reference(torch.zeros_like(out), scores, v_mean, gate, offsets)
    got = coarse_branch(out.clone(), scores, v_mean, gate, offsets, backend="eager")
    bound = 2 * relative_error(plain, exact)
    assert relative_error(got, exact) <= bound < relative_error(got.float() * 1.01, exact)
