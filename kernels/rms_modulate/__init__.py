"""rms_modulate: RMSNorm, then scale and shift by the modulation row of each token."""

import torch

from ..device import Case, triton_why_not
from ..quantise_rows import QuantisedRows
from ..registry import Impl, register, resolve
from ..segments import Segments
from .eager import rms_modulate_eager
from .reference import rms_modulate_reference

__all__ = ["rms_modulate", "rms_modulate_eager", "rms_modulate_reference"]


def rms_modulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    segments: Segments,
    eps: float,
    form: str = "",
    *,
    backend: str = "auto",
) -> torch.Tensor | QuantisedRows:
    """RMSNorm(x) * (1 + scale[r]) + shift[r].

    Args:
        x: [S, C], last dimension contiguous. Not changed.
        weight: [C].
        scale, shift: [R, C], last dimension contiguous.
        segments: r of every token.
        form: "" for a plain tensor, or a form of quantise_rows: the result is then quantised without a rounding before.

    Returns:
        [S, C] in x's dtype, or QuantisedRows.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    return resolve("rms_modulate", backend, Case.of(x))(x, weight, scale, shift, segments, eps, form)


def _load_triton():
    from .triton_kernel import rms_modulate_triton

    return rms_modulate_triton


register(Impl(op="rms_modulate", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="rms_modulate", name="eager", rank=50, load=lambda: rms_modulate_eager))
register(Impl(op="rms_modulate", name="reference", rank=100, load=lambda: rms_modulate_reference))
