"""Mirrors fasth3_core/vae/precision.py: fp32 is fp32 inside, and the caller's settings are back outside."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.vae.precision import exact_fp32

CPU = torch.device("cpu")


def flags():
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()


@pytest.fixture(autouse=True)
def _restore():
    conv, _, matmul = flags()
    yield
    torch.backends.cudnn.allow_tf32 = conv
    torch.set_float32_matmul_precision(matmul)


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
@pytest.mark.parametrize("fails", [True, False])
def test_flags_come_back(conv, matmul, fails):
    torch.backends.cudnn.allow_tf32 = conv
    torch.set_float32_matmul_precision(matmul)
    before = flags()
    try:
        with exact_fp32(CPU):
            assert flags() == (False, False, "highest")
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert flags() == before


@pytest.mark.parametrize("name", ["cudnn.conv", "cuda.matmul"])
@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch has no per-operation precision flags")
def test_per_operation_flags_come_back(name):
    """Once these are written, torch refuses to read the older flags."""
    backend, operation = name.split(".")
    owner = getattr(getattr(torch.backends, backend), operation)
    before = owner.fp32_precision
    other = "ieee" if name == "cudnn.conv" else "tf32"
    try:
        owner.fp32_precision = other
        with exact_fp32(CPU):
            assert owner.fp32_precision == "ieee"
        assert owner.fp32_precision == other
    finally:
        owner.fp32_precision = before


def test_autocast_is_off_inside():
    a = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with exact_fp32(CPU):
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16
