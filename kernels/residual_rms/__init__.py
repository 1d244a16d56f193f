"""residual_rms: a scaled branch into the fp32 residual stream, and the RMS norm of the sum, in one pass."""

import torch

from ..device import Case, triton_why_not
from ..quantise_rows import QuantisedRows
from ..registry import Impl, register, resolve
from .eager import residual_rms_eager
from .reference import residual_rms_reference

__all__ = ["residual_rms", "residual_rms_eager", "residual_rms_reference"]


def residual_rms(
    x: torch.Tensor,
    y: torch.Tensor | None,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    form: str = "",
    *,
    backend: str = "auto",
) -> torch.Tensor | QuantisedRows:
    """x += scale * (y + bias) in place; return RMSNorm(x) * weight.

    Args:
        x: [S, C] fp32, last dimension contiguous. Overwritten, unless y is None, which is the norm alone.
        y: [S, C] of any float dtype: a branch whose product left out its bias, or has it and gives None for it.
        scale, bias: [C], fp32 and any float dtype.
        weight: [C] fp32.
        dtype: of the result.
        form: "" for a plain tensor, or a form of quantise_rows: the norm is then quantised without a rounding before.

    Returns:
        [S, C] in `dtype`, or QuantisedRows.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    return resolve("residual_rms", backend, Case.of(x))(x, y, scale, bias, weight, eps, dtype, form)


def _load_triton():
    from .triton_kernel import residual_rms_triton

    return residual_rms_triton


register(Impl(op="residual_rms", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="residual_rms", name="eager", rank=50, load=lambda: residual_rms_eager))
register(Impl(op="residual_rms", name="reference", rank=100, load=lambda: residual_rms_reference))
