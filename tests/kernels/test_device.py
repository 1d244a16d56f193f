"""Mirrors kernels/device.py."""

import sys
from types import SimpleNamespace

import torch
from comfyui_fasth3.kernels.device import (
    Case,
    failure_of,
    first_line,
    flash_varlen_why_not,
    hopper_why_not,
    triton_why_not,
    warps_in_place,
)


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


def test_hopper_kernels_name_what_is_missing(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert hopper_why_not(Case(device=torch.device("cpu"), dtype=torch.float16)) == "needs an NVIDIA GPU, got cpu"
    assert "(Hopper), got 10.0" in hopper_why_not(Case(device=cuda, dtype=torch.float16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert hopper_why_not(Case(device=cuda, dtype=torch.float32)) == "needs bf16 or fp16, got torch.float32"


def test_a_failed_self_check_is_a_reason_and_asked_once(monkeypatch):
    asked = []

    def self_check(device, dtype):
        asked.append(dtype)
        if dtype == torch.float16:
            raise RuntimeError("\nptxas: no such target\nand more")

    monkeypatch.setitem(sys.modules, "a_kernel", SimpleNamespace(self_check=self_check))
    cpu = torch.device("cpu")
    for _ in range(2):
        assert failure_of("a_kernel", cpu, torch.bfloat16) is None
        why = failure_of("a_kernel", cpu, torch.float16)
        assert why == "cannot run on cpu in torch.float16: RuntimeError: ptxas: no such target"
    assert asked == [torch.bfloat16, torch.float16]
    assert "ModuleNotFoundError" in failure_of("no_such_kernel", cpu, torch.float16)
    assert first_line(ValueError()) == "ValueError: "
