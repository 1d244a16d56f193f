"""linear_swiglu: a product and the SwiGLU of its halves, which need not be written in between."""

import torch

from ..device import Case, failure_of, hopper_why_not
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


def gluon_why_not(case: Case) -> str | None:
    """Why the Hopper kernel cannot take this case. The last question, asked once per device, runs a small case."""
    return hopper_why_not(case) or failure_of(f"{__package__}.hopper_kernel", case.device, case.dtype)


def _load_hopper():
    from .hopper_kernel import linear_swiglu_hopper

    return linear_swiglu_hopper


register(Impl(op="linear_swiglu", name="hopper", rank=5, load=_load_hopper, why_not=gluon_why_not))
register(Impl(op="linear_swiglu", name="eager", rank=50, load=lambda: linear_swiglu_eager))
register(Impl(op="linear_swiglu", name="reference", rank=100, load=lambda: linear_swiglu_reference))
