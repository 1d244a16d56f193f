"""bounded_attention against fp32: several sequences, odd lengths, slices of one product with NaN around them."""

import pytest
import torch
from comfyui_fasth3.kernels.bounded_attention import bounded_attention, bounded_why_not
from comfyui_fasth3.kernels.device import Case
from comfyui_fasth3.kernels.registry import BackendUnavailable, resolve


@pytest.fixture(params=["eager", "triton"])
def run(request):
    """(backend, device) of one implementation."""
    return request.param, request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"


def heads(sequences, length, H, D, dtype, device):
    """q, k, v as slices of one product whose other columns are NaN; q and k normalised, some of them alike."""
    fused = torch.full((sequences * length, 3 * H + 1, D), float("nan"), dtype=dtype, device=device)
    x = torch.randn(sequences * length, 3 * H, D)
    x[::3, H : 2 * H] = x[::3, :H] * 2  # the largest logit there is
    x[:, : 2 * H] /= x[:, : 2 * H].square().mean(-1, keepdim=True).sqrt()
    fused[:, : 3 * H] = x.to(device, dtype)
    return fused[:, : 3 * H].unflatten(1, (3, H)).unbind(1)


def error(out, truth):
    return ((out.float() - truth).norm() / truth.norm()).item()


# relative L2: the weights round once to the dtype and so does the result
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize(
    ("sequences", "length", "H", "D"), [(2, 69, 3, 64), (3, 64, 1, 32), (1, 5, 2, 64), (1, 150, 2, 16)]
)
def test_against_fp32(sequences, length, H, D, dtype, tolerance, run):
    backend, device = run
    q, k, v = heads(sequences, length, H, D, dtype, device)
    truth = bounded_attention(q.float(), k.float(), v.float(), length, backend="reference")
    out = bounded_attention(q, k, v, length, backend=backend)
    assert out.shape == (sequences * length, H * D) and out.dtype == dtype
    assert error(out, truth) <= tolerance < error(out.float() * 1.01, truth)


def test_a_sequence_does_not_see_the_next(run):
    backend, device = run
    q, k, v = heads(2, 69, 2, 64, torch.float16, device)
    before = bounded_attention(q, k, v, 69, backend=backend)[:69].clone()
    k[69:], v[69:] = float("nan"), float("nan")
    assert torch.equal(bounded_attention(q, k, v, 69, backend=backend)[:69], before)


def test_rows_that_are_not_16_bytes_apart_come_by_pointer(triton_device):
    fused = torch.randn(70, 3 * 64 + 1, device=triton_device).half()
    q, k, v = (fused[:, 64 * i : 64 * i + 64].unflatten(1, (1, 64)) for i in range(3))
    q, k = (x / x.float().square().mean(-1, keepdim=True).sqrt().half() for x in (q, k))
    truth = bounded_attention(q.float(), k.float(), v.float(), 70, backend="reference")
    assert error(bounded_attention(q, k, v, 70, backend="triton"), truth) <= 1e-3


def test_other_generations_keep_torchs_attention(monkeypatch):
    case = Case(device=torch.device("cuda"), dtype=torch.float16, head_dim=64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert bounded_why_not(case) == "measured on compute capability 9.0 alone, got 8.9: torch's attention runs"


@pytest.mark.parametrize(
    ("dtype", "D", "why"), [(torch.float32, 64, "fp16 or bf16"), (torch.float16, 128, "16, 32 or 64, got 128")]
)
def test_what_the_kernel_does_not_take(dtype, D, why):
    x = torch.zeros(4, 1, D, dtype=dtype)
    with pytest.raises(BackendUnavailable, match=why):
        bounded_attention(x, x, x, 4, backend="triton")
    assert resolve("bounded_attention", "auto", Case.of(x)).name == "eager"
