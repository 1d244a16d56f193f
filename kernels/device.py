"""What this machine can run. Every `why_not` asks here, so two ops never disagree about the device."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton on the CPU: numerics only, very slow. Tests use it where there is no GPU."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an op will be called with, as far as an implementation may care. Constant over a run."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int = 128
    tile_size: int = 64
    """Most tokens that a tile may have."""
    grad: bool = False
    """Whether a gradient would have to flow."""

    @classmethod
    def of(cls, x: torch.Tensor, tile_size: int = 64) -> "Case":
        """The case of a tensor whose last dimension is the head's."""
        grad = torch.is_grad_enabled() and x.requires_grad
        return cls(device=x.device, dtype=x.dtype, head_dim=x.shape[-1], tile_size=tile_size, grad=grad)


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_why_not(case: Case) -> str | None:
    if not has_triton():
        return "triton is not installed"
    if case.device.type != "cuda" and not INTERPRET:
        return f"needs a CUDA device, got {case.device.type}"
    if case.grad:
        return "forward only, but the input requires grad"
    return None


def flash_varlen_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's packed variable-length attention cannot run."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, got {device.type if torch.version.hip is None else 'ROCm'}"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"needs torch 2.10 or newer, got {torch.__version__}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs compute capability 8.0, got {torch.cuda.get_device_capability(device)}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs fp16 or bf16, got {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"needs a head dim that is a multiple of 8 up to 256, got {head_dim}"
    return None


@contextmanager
def full_precision_matmul() -> Iterator[None]:
    """fp32 matrix products inside are fp32, whatever the process allows (TF32, bf16); its settings come back after.

    The settings belong to the process, so another thread's products are slower meanwhile, never less exact.
    """
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch before 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    lowered = [
        (backend, backend.fp32_precision)
        for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
        if backend.fp32_precision not in ("ieee", "none")
    ]
    for backend, _ in lowered:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, before in lowered:
            backend.fp32_precision = before
