"""quantise_rows: activations in 8 bits with one scale a row, for products with 8-bit weights."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import quantise_rows_eager
from .forms import FORMS, QuantisedRows
from .reference import quantise_rows_reference

__all__ = ["FORMS", "QuantisedRows", "quantise_rows", "quantise_rows_eager", "quantise_rows_reference"]


def quantise_rows(x: torch.Tensor, form: str, *, backend: str = "auto") -> QuantisedRows:
    """x as data * scale, with the largest magnitude of each row at the end of the range.

    Args:
        x: [S, C] float, last dimension contiguous. Not changed.
        form: "fp8" (float8_e4m3fn, to 448) or "int8" (to 127, rounded to even).

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    return resolve("quantise_rows", backend, Case.of(x))(x, form)


def _load_triton():
    from .triton_kernel import quantise_rows_triton

    return quantise_rows_triton


register(Impl(op="quantise_rows", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="quantise_rows", name="eager", rank=50, load=lambda: quantise_rows_eager))
register(Impl(op="quantise_rows", name="reference", rank=100, load=lambda: quantise_rows_reference))
