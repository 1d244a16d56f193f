"""residual_rms_modulate: gated_residual and the rms_modulate that follows it, in one pass over the residual stream."""

import torch

from ..device import Case, triton_why_not
from ..quantise_rows import QuantisedRows
from ..registry import Impl, register, resolve
from ..segments import Segments
from .eager import residual_rms_modulate_eager
from .reference import residual_rms_modulate_reference

__all__ = ["residual_rms_modulate", "residual_rms_modulate_eager", "residual_rms_modulate_reference"]


def residual_rms_modulate(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    segments: Segments,
    eps: float,
    form: str = "",
    *,
    backend: str = "auto",
) -> torch.Tensor | QuantisedRows:
    """Add gate[r] * y to x in place; return RMSNorm(x) * (1 + scale[r]) + shift[r] of the x as stored.

    Args:
        x, y: [S, C], same dtype, last dimension contiguous. x is overwritten.
        weight: [C].
        gate, scale, shift: [R, C], last dimension contiguous. The gate is a plain multiplier: no activation.
        segments: r of every token.
        form: "" for a plain tensor, or a form of quantise_rows: the result is then quantised without a rounding before.

    Returns:
        [S, C] in x's dtype, or QuantisedRows.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    run = resolve("residual_rms_modulate", backend, Case.of(x))
    return run(x, y, gate, weight, scale, shift, segments, eps, form)


def _load_triton():
    from .triton_kernel import residual_rms_modulate_triton

    return residual_rms_modulate_triton


_OP = "residual_rms_modulate"
register(Impl(op=_OP, name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op=_OP, name="eager", rank=50, load=lambda: residual_rms_modulate_eager))
register(Impl(op=_OP, name="reference", rank=100, load=lambda: residual_rms_modulate_reference))
