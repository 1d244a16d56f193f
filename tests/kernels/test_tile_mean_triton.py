"""Mirrors kernels/tile_mean/triton_kernel.py."""

import pytest
import torch
from comfyui_fasth3.kernels.tile_mean import tile_mean, tile_mean_reference

from .vsa_cases import offsets_of

SIZES = [64, 6, 130, 1, 256, 33]


@pytest.mark.parametrize("dim", [16, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_means_of_a_slice_of_the_fused_projection(dtype, dim, triton_device):
    offsets = offsets_of(SIZES).to(triton_device)
    x = torch.full((sum(SIZES), 3, 2, dim + 8), float("nan"), dtype=dtype, device=triton_device)[:, 1, :, :dim]
    x.copy_(torch.randn(x.shape))
    out = tile_mean(x, offsets, 256, backend="triton")
    expected = tile_mean_reference(x, offsets, 256)
    assert out.dtype == torch.float32 and out.shape == (2, len(SIZES), dim)
    # sums of at most 256 values of about 1 in fp32, in another order
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    with pytest.raises(AssertionError):  # the tolerance must bite
        torch.testing.assert_close(out * 1.01, expected, rtol=0, atol=1e-6)


def test_another_tile_does_not_leak(triton_device):
    offsets = offsets_of(SIZES).to(triton_device)
    x = torch.randn(sum(SIZES), 1, 32, device=triton_device)
    clean = tile_mean(x, offsets, 256, backend="triton")
    x[64:70] = float("nan")
    out = tile_mean(x, offsets, 256, backend="triton")
    others = [n for n in range(len(SIZES)) if n != 1]
    assert out[:, 1].isnan().all() and torch.equal(out[:, others], clean[:, others])
