"""The Triton form of kernels/int8_linear/ against its reference."""

import pytest
import torch
from comfyui_fasth3.kernels.device import INTERPRET
from comfyui_fasth3.kernels.int8_linear import dequantise_int8_reference, int8_linear

from .test_int8_linear import golden_cases
from .vsa_cases import relative_error


@pytest.fixture
def kernel():
    return pytest.importorskip("comfyui_fasth3.kernels.int8_linear.triton_kernel", reason="triton is not installed")


def weights(O, I, device):
    weight = torch.randint(-128, 128, (O, I), dtype=torch.int8, device=device)
    return weight, torch.rand(O, 1, device=device) / 1000 + 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("O, I, group", [(3, 256, 256), (70, 512, 256), (600, 128, 64), (5, 48, 16), (9, 48, 4),
                                         (66, 100, None), (3, 20, 4)])  # fmt: skip
def test_the_weight_rounds_once(O, I, group, dtype, triton_device, kernel):
    weight, scale = weights(O, I, triton_device)
    scales = torch.full((O + 128, 1), torch.nan, device=triton_device)
    scales[:O] = scale
    scale = scales[:O]  # a block of rows ends among NaN
    got = kernel.dequantise_int8_triton(weight, scale, group, dtype)
    # Triton's interpreter cuts off where a GPU rounds to bf16, and makes a tiny number of zero
    rtol, atol = (2**-7, 1e-37) if INTERPRET and dtype == torch.bfloat16 else (0, 0)
    torch.testing.assert_close(got, dequantise_int8_reference(weight, scale, group).to(dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_linear_in_parts(dtype, bias, triton_device, kernel, monkeypatch):
    monkeypatch.setattr(kernel, "_CHUNK_BYTES", 64 * 256 * 2)  # 64 of 150 rows at a time
    weight, scale = weights(150, 256, triton_device)
    weight = torch.cat([weight, weight], dim=1)[:, :256]  # rows of a wider buffer
    padded = torch.full((4, 7, 280), torch.nan, dtype=dtype, device=triton_device)
    x = padded[:3, :, 8:264].copy_(torch.randn(3, 7, 256))
    b = torch.randn(150, device=triton_device).to(dtype) if bias else None
    exact = int8_linear(x.float(), weight, scale, None if b is None else b.float(), group=256, backend="reference")
    plain = torch.nn.functional.linear(x, dequantise_int8_reference(weight, scale, 256).to(dtype), b)
    got = int8_linear(x, weight, scale, b, group=256, backend="triton")
    bound = 2 * relative_error(plain, exact)
    assert relative_error(got, exact) <= bound < relative_error(got.float() * 1.01, exact)
    result = torch.full((5, 7, 150), torch.nan, dtype=dtype, device=triton_device)
    int8_linear(x, weight, scale, b, group=256, out=result[1:4], backend="triton")
    assert torch.equal(result[1:4], got) and result[[0, 4]].isnan().all()


def test_triton_golden_linear(golden_dir, triton_device):
    for case, group in golden_cases(golden_dir):
        case = {name: tensor.to(triton_device) for name, tensor in case.items()}
        y = int8_linear(case["x"], case["weight"], case["weight_scale"], group=group, backend="triton")
        torch.testing.assert_close(y, case["y"], rtol=0, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(y * 1.01, case["y"], rtol=0, atol=1e-5)
