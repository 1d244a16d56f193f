"""fp8_linear against the product of the values that its operands stand for."""

import pytest
import torch
from comfyui_fasth3.kernels.fp8_linear import eager, fp8_linear, fp8_why_not
from comfyui_fasth3.kernels.quantise_rows import quantise_rows
from comfyui_fasth3.kernels.registry import BackendUnavailable


def operands(device, rows=37):
    """x, and its rows quantised, with NaN around them; the quantised weight."""
    padded = torch.full((rows + 3, 128), torch.nan, device=device)
    x = padded[:rows, 16:112].copy_(torch.randn(rows, 96) * torch.logspace(-2, 2, rows)[:, None])
    return quantise_rows(x, "fp8"), quantise_rows(torch.randn(48, 96, device=device), "fp8"), x


def error(y, truth):
    return ((y.double() - truth).norm(dim=1) / truth.norm(dim=1)).max().item()


def test_reference_is_the_product_of_the_dequantised():
    x, weight, _ = operands("cpu")
    truth = (x.data.double() * x.scale) @ (weight.data.double() * weight.scale).T
    y = fp8_linear(x, weight, torch.float32, backend="reference")
    assert error(y, truth) <= 1e-6 < error(y * 1.01, truth)


def test_plain_rows_are_quantised_first():
    x, weight, plain = operands("cpu")
    assert torch.equal(fp8_linear(plain, weight, torch.float32), fp8_linear(x, weight, torch.float32))


def test_the_fast_product_is_refused_without_float8():
    x, weight, _ = operands("cpu")
    with pytest.raises(BackendUnavailable, match="needs an NVIDIA GPU, got cpu"):
        fp8_linear(x, weight, torch.bfloat16, backend="scaled_mm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_in_parts(dtype, monkeypatch):
    monkeypatch.setattr(eager, "_BYTES", 7 * 96 * dtype.itemsize)  # 7 of 48 output rows at a time
    x, weight, _ = operands("cpu")
    truth = fp8_linear(x, weight, torch.float32, backend="reference").double()
    plain = (x.dequantise(dtype) @ weight.dequantise(dtype).T).double()
    y = fp8_linear(x, weight, dtype, backend="eager")
    bound = max(2 * error(plain, truth), 1e-6)
    assert y.dtype == dtype and error(y, truth) <= bound < error(y.double() * 1.01, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fast_product(dtype):
    if not torch.cuda.is_available() or (why := fp8_why_not(torch.device("cuda"))) is not None:
        pytest.skip("needs a CUDA device of capability 8.9" if not torch.cuda.is_available() else why)
    x, weight, _ = operands("cuda")
    truth = fp8_linear(x, weight, torch.float32, backend="reference").double()
    y = fp8_linear(x, weight, dtype, backend="scaled_mm")
    # one rounding to the dtype, and the 14 bits that the fast accumulation keeps
    assert y.dtype == dtype and error(y, truth) <= 4e-3 < error(y.float() * 1.01, truth)
    result = torch.full((len(y) + 2, y.shape[1]), torch.nan, dtype=dtype, device="cuda")
    fp8_linear(x, weight, dtype, out=result[1:-1], backend="scaled_mm")
    assert torch.equal(result[1:-1], y) and result[[0, -1]].isnan().all()
