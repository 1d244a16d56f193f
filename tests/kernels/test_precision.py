"""Mirrors kernels/precision.py: fp32 is fp32 inside, and the caller's settings are back outside."""

import pytest
import torch
from comfyui_fasth3.kernels.precision import exact_fp32, full_precision_matmul

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


MATMUL = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
new_settings = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has one setting"
)


@pytest.fixture
def _restored():
    before = [m.fp32_precision for m in MATMUL]
    yield
    for m, value in zip(MATMUL, before, strict=True):
        m.fp32_precision = value


@new_settings
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_matmul_is_full_precision_inside_and_as_before_after(setting):
    for m in MATMUL:
        m.fp32_precision = setting
    with full_precision_matmul():
        assert [m.fp32_precision for m in MATMUL] == ["ieee", "ieee"]
        with full_precision_matmul():
            pass
        assert [m.fp32_precision for m in MATMUL] == ["ieee", "ieee"]
    assert [m.fp32_precision for m in MATMUL] == [setting, setting]


@new_settings
@pytest.mark.usefixtures("_restored")
def test_matmul_settings_come_back_after_an_error():
    torch.set_float32_matmul_precision("medium")
    before = [m.fp32_precision for m in MATMUL]
    with pytest.raises(RuntimeError, match="stop"), full_precision_matmul():
        raise RuntimeError("stop")
    assert [m.fp32_precision for m in MATMUL] == before
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
