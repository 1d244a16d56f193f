"""linear_swiglu: a product and the SwiGLU of its halves, which need not be written in between."""

from functools import cache

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import linear_swiglu_eager
from .reference import linear_swiglu_reference

__all__ = ["linear_swiglu", "linear_swiglu_eager", "linear_swiglu_reference"]


def linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """silu(x Wg^T + bg) * (x Wv^T + bv).

    Args:
        x: [S, C], last dimension contiguous.
        weight: [2F, C] in x's dtype, contiguous: the value's rows Wv, then the gate's Wg.
        bias: [2F] in x's dtype, in the same order.

    Returns:
        [S, F] in x's dtype.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    return resolve("linear_swiglu", backend, Case.of(x))(x, weight, bias)


def hopper_why_not(case: Case) -> str | None:
    """Why the Hopper kernel cannot take this case. The last question, asked once per device, runs a small case."""
    if case.device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, got {case.device.type if torch.version.hip is None else 'ROCm'}"
    major, minor = torch.cuda.get_device_capability(case.device)
    if major != 9:
        return f"written for compute capability 9.x (Hopper), got {major}.{minor}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, got {case.dtype}"
    return triton_why_not(case) or _hopper_failure(case.device, case.dtype)


@cache
def _hopper_failure(device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        from .hopper_kernel import self_check

        self_check(device, dtype)
    except Exception as error:  # a Triton without this Gluon, its compiler, the assembler, the driver, a wrong result
        first = next(iter(str(error).strip().splitlines()), "")
        return f"cannot run on {device} in {dtype}: {type(error).__name__}: {first}"
    return None


def _load_hopper():
    from .hopper_kernel import linear_swiglu_hopper

    return linear_swiglu_hopper


register(Impl(op="linear_swiglu", name="hopper", rank=5, load=_load_hopper, why_not=hopper_why_not))
register(Impl(op="linear_swiglu", name="eager", rank=50, load=lambda: linear_swiglu_eager))
register(Impl(op="linear_swiglu", name="reference", rank=100, load=lambda: linear_swiglu_reference))
