"""Mirrors kernels/coarse_branch/triton_kernel.py."""

import pytest
import torch
from comfyui_fasth3.kernels.coarse_branch import coarse_branch, coarse_branch_reference

from .vsa_cases import offsets_of, relative_error

SIZES = [64, 6, 5, 64, 33, 130, *[1] * 66]


def make(device, dtype, dim):
    S, N, H = sum(SIZES), len(SIZES), 2
    gate = among_nan((S + 3, 4, H, dim), dtype, device)[:S, 3]
    out = among_nan((S, H + 1, dim), dtype, device)[:, 1:]
    scores = among_nan((H, N + 3, N + 5), torch.float32, device)[:, :N, :N]
    v_mean = among_nan((H + 1, N, dim), torch.float32, device)[:H]
    for x, scale in ((gate, 1), (out, 1), (scores, 3), (v_mean, 1)):
        x.copy_(torch.randn(x.shape) * scale)
    return out, scores, v_mean, gate, offsets_of(SIZES).to(device)


def among_nan(shape, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_fp32_is_the_reference(dim, triton_device):
    out, *rest = make(triton_device, torch.float32, dim)
    expected = coarse_branch_reference(out.clone(), *rest)
    assert coarse_branch(out, *rest, backend="triton") is out
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)  # sums of 72 products in another order
    with pytest.raises(AssertionError):  # the tolerance must bite
        torch.testing.assert_close(out * 1.01, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_loses_no_more_than_plain_torch(dtype, triton_device):
    out, scores, v_mean, gate, offsets = make(triton_device, dtype, 64)
    exact = coarse_branch_reference(out.float(), scores, v_mean, gate.float(), offsets)
    weights = scores.to(dtype).softmax(-1)
    rows = (weights @ v_mean.to(dtype)).transpose(0, 1).repeat_interleave(offsets.diff().long(), dim=0)
    bound = relative_error(out + rows * gate, exact)
    coarse_branch(out, scores, v_mean, gate, offsets, backend="triton")
    assert relative_error(out, exact) <= bound
    assert relative_error(out.float() * 1.01, exact) > bound


def test_only_a_tiles_own_rows_see_its_scores(triton_device):
    out, scores, v_mean, gate, offsets = make(triton_device, torch.float32, 16)
    clean = coarse_branch(out.clone(), scores, v_mean, gate, offsets, backend="triton")
    scores[:, 3] = float("nan")
    got = coarse_branch(out, scores, v_mean, gate, offsets, backend="triton")
    rows = torch.zeros(sum(SIZES), dtype=torch.bool)
    rows[offsets[3] : offsets[4]] = True
    assert got[rows].isnan().all() and torch.equal(got[~rows], clean[~rows])


def test_refuses_means_that_are_not_dense(triton_device):
    out, scores, v_mean, gate, offsets = make(triton_device, torch.float32, 16)
    with pytest.raises(ValueError, match=r"v_mean .* expected dense"):
        coarse_branch(out, scores, v_mean[:, ::1, ::2], gate, offsets, backend="triton")
