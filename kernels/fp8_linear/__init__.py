"""fp8_linear: y = x Wᵀ with both sides in float8_e4m3fn and one scale a row."""

import torch

from ..device import Case
from ..quantise_rows import QuantisedRows, quantise_rows
from ..registry import Impl, register, resolve
from .eager import fp8_linear_eager
from .reference import fp8_linear_reference
from .scaled_mm import fp8_linear_scaled_mm, fp8_why_not, scaled_mm_why_not

__all__ = ["fp8_linear", "fp8_linear_eager", "fp8_linear_reference", "fp8_why_not"]


def fp8_linear(
    x: torch.Tensor | QuantisedRows,
    weight: QuantisedRows,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Project rows; the bias is the caller's, whose next kernel adds it.

    Args:
        x: [S, I] float, quantised here, or rows of quantise_rows' form "fp8".
        weight: [O, I] of the same form; I and O are multiples of 16.
        dtype: of the result.
        out: [S, O] of it, contiguous, to write it into; None makes a new one.

    Returns:
        [S, O] in `dtype`.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    if isinstance(x, torch.Tensor):
        x = quantise_rows(x, "fp8")
    case = Case(device=x.data.device, dtype=dtype, head_dim=x.data.shape[1])
    return resolve("fp8_linear", backend, case)(x, weight, dtype, out=out)


register(
    Impl(
        op="fp8_linear", name="scaled_mm", rank=10, load=lambda: fp8_linear_scaled_mm, why_not=scaled_mm_why_not
    )
)
register(Impl(op="fp8_linear", name="eager", rank=50, load=lambda: fp8_linear_eager))
register(Impl(op="fp8_linear", name="reference", rank=100, load=lambda: fp8_linear_reference))
