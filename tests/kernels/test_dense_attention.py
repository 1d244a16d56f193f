"""Mirrors kernels/dense_attention/."""

import pytest
import torch
from comfyui_fasth3.kernels.dense_attention import dense_attention, eager

from .vsa_cases import fused, relative_error


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_matches_the_formula_on_strided_views(backend):
    qkv = torch.full((90, 3, 4, 48), float("nan"))  # around every head's channels, every token's heads and at the end
    q, k, v = qkv[:77, :, :3, :40].copy_(torch.stack(fused(77, 3, 40), dim=1)).unbind(1)
    q = q[:13]
    weights = (torch.einsum("mhd,shd->hms", q.double(), k.double()) / 40**0.5).softmax(-1)
    expected = torch.einsum("hms,shd->mhd", weights, v.double())
    out = dense_attention(q, k, v, backend=backend)
    assert out.shape == q.shape
    assert relative_error(out, expected) <= 1e-6 < relative_error(out * 1.01, expected)


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("most_bytes", [1 << 20, 2 * 77 * 40 * 4, 1], ids=["whole", "two-heads", "one-head"])
def test_over_its_queries(backend, most_bytes, monkeypatch):
    monkeypatch.setattr(eager, "RESULT_BYTES", most_bytes)
    q, k, v = fused(77, 5, 40)
    kept = k.clone(), v.clone()
    expected = dense_attention(q, k, v, backend=backend)
    got = dense_attention(q, k, v, out=q, backend=backend)
    assert got is q and torch.equal(q, expected) and torch.equal(k, kept[0]) and torch.equal(v, kept[1])


def test_reference_is_fp32_inside():
    q, k, v = fused(50, 2, 16, torch.bfloat16)
    exact = dense_attention(q.float(), k.float(), v.float(), backend="reference")
    assert torch.equal(dense_attention(q, k, v, backend="reference"), exact.bfloat16())
