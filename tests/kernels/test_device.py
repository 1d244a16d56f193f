"""Mirrors kernels/device.py."""

import torch
from comfyui_fasth3.kernels.device import Case, flash_varlen_why_not, triton_why_not, warps_in_place


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


def test_rows_in_place_have_at_least_an_element_a_thread():
    assert [warps_in_place(n, 4) for n in (1, 16, 32, 64, 128, 2048)] == [1, 1, 1, 2, 4, 4]
