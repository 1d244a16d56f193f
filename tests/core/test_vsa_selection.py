"""Mirrors fasth3_core/vsa/selection.py."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.vsa import selection
from comfyui_fasth3.fasth3_core.vsa.selection import pooled_scores


def test_scores_are_scaled_products():
    q, k = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    expected = torch.einsum("hmd,hnd->hmn", q.double(), k.double()) / 4
    scores = pooled_scores(q, k)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_scores_ignore_the_precision_that_the_process_allows(monkeypatch):
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    seen, real = [], torch.bmm

    def bmm(*args):
        seen.append([s.fp32_precision for s in settings])
        return real(*args)

    monkeypatch.setattr(selection.torch, "bmm", bmm)
    torch.set_float32_matmul_precision("medium")
    allowed = [s.fp32_precision for s in settings]
    assert "ieee" not in allowed
    try:
        pooled_scores(torch.randn(1, 4, 8), torch.randn(1, 4, 8))
        assert seen == [["ieee", "ieee"]]
        assert [s.fp32_precision for s in settings] == allowed
    finally:
        torch.set_float32_matmul_precision("highest")
