"""swiglu: silu(gate) * value, each after its bias if it has one, plain or quantised by rows."""

import torch

from ..device import Case, triton_why_not
from ..quantise_rows import QuantisedRows
from ..registry import Impl, register, resolve
from .eager import swiglu_eager
from .reference import swiglu_reference

__all__ = ["swiglu", "swiglu_eager", "swiglu_reference"]


def swiglu(
    value: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None = None, form: str = "", *, backend: str = "auto"
) -> torch.Tensor | QuantisedRows:
    """silu(gate) * value, each with its half of the bias.

    Args:
        value, gate: [S, F], same dtype, last dimension contiguous; halves of one product or two products. Their
            content is lost: an implementation may work in place.
        bias: [2F], the value's first, or None where the products have it.
        form: "" for a plain tensor, or a form of quantise_rows.

    Returns:
        [S, F] in value's dtype, or QuantisedRows.

    Raises:
        BackendUnavailable: the named backend cannot take value.
    """
    return resolve("swiglu", backend, Case.of(value))(value, gate, bias, form)


def _load_triton():
    from .triton_kernel import swiglu_triton

    return swiglu_triton


register(Impl(op="swiglu", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="swiglu", name="eager", rank=50, load=lambda: swiglu_eager))
register(Impl(op="swiglu", name="reference", rank=100, load=lambda: swiglu_reference))
