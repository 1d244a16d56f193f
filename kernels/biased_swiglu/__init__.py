"""biased_swiglu: silu(gate + its bias) * (value + its bias), plain or quantised by rows."""

import torch

from ..device import Case, triton_why_not
from ..quantise_rows import QuantisedRows
from ..registry import Impl, register, resolve
from .eager import biased_swiglu_eager
from .reference import biased_swiglu_reference

__all__ = ["biased_swiglu", "biased_swiglu_eager", "biased_swiglu_reference"]


def biased_swiglu(
    value: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None, form: str = "", *, backend: str = "auto"
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
    return resolve("biased_swiglu", backend, Case.of(value))(value, gate, bias, form)


def _load_triton():
    from .triton_kernel import biased_swiglu_triton

    return biased_swiglu_triton


register(Impl(op="biased_swiglu", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="biased_swiglu", name="eager", rank=50, load=lambda: biased_swiglu_eager))
register(Impl(op="biased_swiglu", name="reference", rank=100, load=lambda: biased_swiglu_reference))
