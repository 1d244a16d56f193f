"""Mirrors kernels/int8_linear/: golden values, then the eager form against the reference."""

import json

import pytest
import torch
from comfyui_fasth3.kernels.int8_linear import dequantise_int8, eager, hadamard, int8_linear
from safetensors import safe_open

from .vsa_cases import relative_error


def golden_cases(golden_dir):
    with safe_open(golden_dir / "int8_linear.safetensors", "pt") as file:
        for i, case in enumerate(json.loads(file.metadata()["cases"])):
            tensors = {
                name: file.get_tensor(f"{i}.{name}") for name in ("weight", "weight_scale", "dequantized", "x", "y")
            }
            yield tensors, case["group"] if case["convrot"] else None


def test_golden_dequantised(golden_dir):
    for case, group in golden_cases(golden_dir):
        W = dequantise_int8(case["weight"], case["weight_scale"], group)
        torch.testing.assert_close(W, case["dequantized"], rtol=0, atol=1e-6)
        with pytest.raises(AssertionError):  # the tolerance must bite
            torch.testing.assert_close(W * 1.01, case["dequantized"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_golden_linear(golden_dir, backend):
    for case, group in golden_cases(golden_dir):
        y = int8_linear(case["x"], case["weight"], case["weight_scale"], group=group, backend=backend)
        torch.testing.assert_close(y, case["y"], rtol=0, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(y * 1.01, case["y"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", [1, 4, 16, 256])
def test_the_rotation_is_its_own_inverse(order):
    H = hadamard(order)
    assert torch.equal(H, H.T)
    assert torch.equal(H @ H, torch.eye(order))


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_in_row_blocks(dtype, group, monkeypatch):
    weight = torch.randint(-127, 128, (80, 64), dtype=torch.int8)
    scale, bias = torch.rand(80) / 1000, torch.randn(80).to(dtype)
    x = torch.randn(3, 7, 64).to(dtype)
    monkeypatch.setattr(eager, "_BYTES", 9 * 64 * 4)  # rows 0-8, 9-17, ... 72-79
    exact = int8_linear(x.float(), weight, scale, bias.float(), group=group, backend="reference")
    plain = torch.nn.functional.linear(x, dequantise_int8(weight, scale, group).to(dtype), bias)
    got = int8_linear(x, weight, scale, bias, group=group, backend="eager")
    bound = 2 * relative_error(plain, exact)
    assert relative_error(got, exact) <= bound < relative_error(got.float() * 1.01, exact)
    assert torch.equal(dequantise_int8(weight, scale, group, dtype), dequantise_int8(weight, scale, group).to(dtype))


@pytest.mark.parametrize("group", [0, 8, 12, 256])
def test_a_group_that_does_not_fit_is_refused(group):
    with pytest.raises(ValueError, match=f"rotation group {group} for 64 input features"):
        dequantise_int8(torch.zeros(4, 64, dtype=torch.int8), torch.ones(4), group)
