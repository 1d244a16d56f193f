"""Mirrors kernels/device.py."""

import pytest
import torch
from comfyui_fasth3.kernels.device import Case, flash_varlen_why_not, full_precision_matmul, triton_why_not

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


def test_case_reads_the_tensor():
    x = torch.zeros(3, 2, 80, dtype=torch.bfloat16, requires_grad=True)
    assert Case.of(x, 128) == Case(device=x.device, dtype=x.dtype, head_dim=80, tile_size=128, grad=True)
    with torch.no_grad():
        assert not Case.of(x).grad


def test_reasons_name_what_is_missing(monkeypatch):
    cpu = torch.device("cpu")
    assert flash_varlen_why_not(cpu, torch.bfloat16, 128) == "needs an NVIDIA GPU, got cpu"
    monkeypatch.setattr("comfyui_fasth3.kernels.device.has_triton", lambda: True)
    monkeypatch.setattr("comfyui_fasth3.kernels.device.INTERPRET", False)
    assert triton_why_not(Case(device=cpu, dtype=torch.bfloat16)) == "needs a CUDA device, got cpu"
    monkeypatch.setattr("comfyui_fasth3.kernels.device.INTERPRET", True)
    assert triton_why_not(Case(device=cpu, dtype=torch.bfloat16)) is None
    assert "requires grad" in triton_why_not(Case(device=cpu, dtype=torch.bfloat16, grad=True))
