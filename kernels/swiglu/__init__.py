"""swiglu: silu(gate) * value, for files with the gate half first and for files with the value half first."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import swiglu_eager
from .reference import swiglu_reference

__all__ = ["swiglu", "swiglu_eager", "swiglu_reference"]


def swiglu(x: torch.Tensor, *, gate_first: bool, backend: str = "auto") -> torch.Tensor:
    """silu(gate) * value.

    Args:
        x: [S, 2F], last dimension contiguous. Not changed.
        gate_first: whether the gate is the first half (single-file and original checkpoints) or the second (diffusers).

    Returns:
        [S, F] in x's dtype.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    return resolve("swiglu", backend, Case.of(x))(x, gate_first)


def _load_triton():
    from .triton_kernel import swiglu_triton

    return swiglu_triton


register(Impl(op="swiglu", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="swiglu", name="eager", rank=50, load=lambda: swiglu_eager))
register(Impl(op="swiglu", name="reference", rank=100, load=lambda: swiglu_reference))
