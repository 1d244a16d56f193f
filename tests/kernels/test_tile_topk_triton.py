"""Mirrors kernels/tile_topk/triton_kernel.py: equal to the reference, ties and NaN included."""

import pytest
import torch
from comfyui_fasth3.kernels.tile_topk import tile_topk, tile_topk_reference

kernel = pytest.importorskip("comfyui_fasth3.kernels.tile_topk.triton_kernel", reason="triton is not installed")
MODES = pytest.mark.parametrize("mode", ["exempt", "compete"])


def check(scores, num_prefix, kept, mode):
    """A few rows are enough: the kernel has no use for as many query tiles as there are video columns."""
    index, count = kernel.tile_topk_triton(scores, num_prefix, kept, mode)
    # on the CPU: CUDA's sort puts a NaN with a sign last
    expected = [x.to(index.device) for x in tile_topk_reference(scores.cpu(), num_prefix, kept, mode)]
    assert index.dtype == count.dtype == torch.int32
    assert torch.equal(index, expected[0]) and torch.equal(count, expected[1])


@MODES
@pytest.mark.parametrize(("P", "V", "kept"), [(5, 40, 4), (0, 7, 7), (3, 1, 1), (40, 9, 8), (2, 33, 1)])
@pytest.mark.parametrize("levels", [2, 10**6], ids=["ties", "distinct"])
def test_equals_the_reference(levels, P, V, kept, mode, triton_device):
    check(torch.randint(-levels, levels, (2, 2, P + V), device=triton_device) / 8, P, kept, mode)


@MODES
def test_more_columns_than_one_warp_holds(mode, triton_device):
    check(torch.randn(1, 2, 4100, device=triton_device), 100, 410, mode)


def test_zeros_of_both_signs_are_equal_and_keep_the_lower_tiles(triton_device):
    scores = torch.zeros(1, 1, 64, device=triton_device)
    scores[..., 1::2] = -0.0
    check(scores, 4, 9, "exempt")


@MODES
def test_not_a_number_is_the_best_score_and_infinities_have_their_place(mode, triton_device):
    nan, inf = float("nan"), float("inf")
    scores = torch.randn(1, 6, 10, device=triton_device)
    scores[0, 0, [3, 7]] = torch.tensor([nan, -nan], device=triton_device)
    scores[0, 1] = nan
    scores[0, 2] = -inf
    scores[0, 3, [4, 5, 6, 8]] = torch.tensor([inf, -inf, nan, inf], device=triton_device)
    scores[0, 4] = inf
    scores[0, 5, 2:] = torch.tensor([1e-45, -1e-45, 0.0, -0.0, 3e38, -3e38, 1e-40, 0.0], device=triton_device)
    for kept in (1, 3, 8):
        check(scores, 2, kept, mode)


def test_a_strided_block_of_scores_through_the_registry(triton_device):
    scores = torch.randn(2, 20, 19, device=triton_device)
    scores[..., 16:] = float("nan")
    block = scores[:, -6:, :16]
    index, count = tile_topk(block, 10, 5, "exempt", backend="triton")
    expected = tile_topk_reference(block, 10, 5, "exempt")
    assert torch.equal(index, expected[0]) and torch.equal(count, expected[1])


def test_refuses_more_columns_than_two_counts_allow(triton_device):
    scores = torch.zeros(1, 1, 1, device=triton_device).expand(1, 1, 40_000)
    with pytest.raises(ValueError, match="last must be 1"):
        kernel.tile_topk_triton(scores, 0, 1, "exempt")
    with pytest.raises(ValueError, match="40000 candidate tiles a row, expected at most 32768"):
        kernel.tile_topk_triton(scores.contiguous(), 0, 1, "exempt")
