"""What this machine can run. Every `why_not` asks here, so two ops never disagree about the device."""

import importlib
import importlib.util
import os
from dataclasses import dataclass
from functools import cache

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton on the CPU: numerics only, very slow. Tests use it where there is no GPU."""


def opted_in(variable: str) -> bool:
    """Whether the environment has this switch at 1, now."""
    return os.environ.get(variable) == "1"


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
    contiguous: bool = True
    """Whether the last dimension is dense in memory. A model's projections and their slices are."""

    @classmethod
    def of(cls, x: torch.Tensor, tile_size: int = 64) -> "Case":
        """The case of a tensor whose last dimension is the head's."""
        grad = torch.is_grad_enabled() and x.requires_grad
        return cls(
            device=x.device, dtype=x.dtype, head_dim=x.shape[-1], tile_size=tile_size, grad=grad,
            contiguous=x.shape[-1] == 1 or x.stride(-1) == 1,
        )


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def triton_why_not(case: Case) -> str | None:
    """Why no Triton kernel can take this case. The first question about a GPU launches one element's worth of work."""
    if not has_triton():
        return "triton is not installed"
    if case.device.type != "cuda" and not INTERPRET:
        return f"needs a CUDA device, got {case.device.type}"
    if case.device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(case.device)
        if (major, minor) < (7, 5):
            return f"Triton targets compute capability 7.5 and newer, got {major}.{minor}"
    if case.dtype not in _TRITON_DTYPES:
        return f"needs fp16, bf16 or fp32, got {case.dtype}"
    if case.grad:
        return "forward only, but the input requires grad"
    if not case.contiguous:
        return "needs a last dimension of stride 1"
    return None if INTERPRET else _triton_launch_failure(case.device, case.dtype)


@cache
def _triton_launch_failure(device: torch.device, dtype: torch.dtype) -> str | None:
    """Compiles and launches a probe. Only that finds a missing C compiler, a driver too old for the compiler, or a GPU
    generation that this Triton does not target, before a run depends on it.
    """
    try:
        importlib.import_module(".triton_probe", __package__).probe(device, dtype)
    except Exception as error:  # the compiler, the assembler, the linker and the driver all raise types of their own
        return f"triton cannot launch on {device} in {dtype}: {first_line(error)}"
    return None


def hopper_why_not(case: Case) -> str | None:
    """Why no kernel written in Gluon for Hopper GPUs can take this case, before its own limits and `failure_of`."""
    if case.device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, got {case.device.type if torch.version.hip is None else 'ROCm'}"
    major, minor = torch.cuda.get_device_capability(case.device)
    if major != 9:
        return f"written for compute capability 9.x (Hopper), got {major}.{minor}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, got {case.dtype}"
    return triton_why_not(case)


@cache
def failure_of(module: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `self_check(device, dtype)` of a module, by its full name, fails: a Triton without this Gluon,
    its compiler, the assembler, the driver, a wrong result. Asked once per device.
    """
    try:
        importlib.import_module(module).self_check(device, dtype)
    except Exception as error:  # each of them raises types of its own
        return f"cannot run on {device} in {dtype}: {first_line(error)}"
    return None


def first_line(error: Exception) -> str:
    """An error's type and the first line of its text, which may have many or none."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def check_last_dim(op: str, **tensors: torch.Tensor) -> None:
    """For kernels that index the last dimension without a stride.

    Raises:
        ValueError: names the tensor whose last dimension is not dense.
    """
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            raise ValueError(f"{op}: {name} {tuple(x.shape)} has strides {x.stride()}; the last must be 1")


def warps_in_place(elements: int, most: int) -> int:
    """Warps for a kernel that writes a row where it has read it: so few that no element is held by two of them, as in
    rows shorter than the threads are many. One could read what the other has written.
    """
    return max(1, min(most, elements // 32))


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
