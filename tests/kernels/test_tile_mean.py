"""Mirrors kernels/tile_mean/."""

import pytest
import torch
from comfyui_fasth3.kernels.tile_mean import eager, tile_mean, tile_mean_reference

from .vsa_cases import fused, offsets_of

# (tile sizes, heads, head dim): one token, sizes that are no power of two, a single tile
CASES = [([64, 1, 30, 64, 7], 2, 80), ([3], 1, 8), ([256, 96, 255], 3, 128)]
# at most 256 values are summed in fp32; only the order of the additions differs
ATOL = 1e-6


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"N{len(c[0])}-H{c[1]}-D{c[2]}")
def test_is_the_plain_mean(case, dtype, backend):
    sizes, heads, dim = case
    x = fused(sum(sizes), heads, dim, dtype)[1]
    out = tile_mean(x, offsets_of(sizes), max(sizes), backend=backend)
    expected = torch.stack([part.double().mean(0) for part in x.split(sizes)], dim=1).float()
    torch.testing.assert_close(out, expected, rtol=0, atol=ATOL)
    with pytest.raises(AssertionError):  # the tolerance must bite
        torch.testing.assert_close(out * 1.01, expected, rtol=0, atol=ATOL)


def test_eager_in_several_passes(monkeypatch):
    sizes = [5, 64, 2, 33, 64, 64, 1]
    x = torch.randn(sum(sizes), 2, 16)
    monkeypatch.setattr(eager, "_BYTES", 2 * 64 * 2 * 16 * 4)
    torch.testing.assert_close(
        tile_mean(x, offsets_of(sizes), 64, backend="eager"), tile_mean_reference(x, offsets_of(sizes), 64),
        rtol=0, atol=ATOL,
    )


def test_a_tile_reads_its_own_tokens_only():
    sizes = [3, 4, 5]
    x = torch.randn(12, 1, 8)
    x[3:7] = float("nan")
    out = tile_mean(x, offsets_of(sizes), 64, backend="eager")
    assert out[:, 1].isnan().all() and out[:, [0, 2]].isfinite().all()
