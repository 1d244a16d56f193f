"""gated_residual: x += gate * y with the modulation row of each token."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from ..segments import Segments
from .eager import gated_residual_eager
from .reference import gated_residual_reference

__all__ = ["gated_residual", "gated_residual_eager", "gated_residual_reference"]


def gated_residual(
    x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, segments: Segments, *, backend: str = "auto"
) -> torch.Tensor:
    """Add gate[r] * y to x in place and return x.

    Args:
        x, y: [S, C], same dtype, last dimension contiguous. x is overwritten.
        gate: [R, C], last dimension contiguous. A plain multiplier: no activation.
        segments: r of every token.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    return resolve("gated_residual", backend, Case.of(x))(x, y, gate, segments)


def _load_triton():
    from .triton_kernel import gated_residual_triton

    return gated_residual_triton


register(Impl(op="gated_residual", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="gated_residual", name="eager", rank=50, load=lambda: gated_residual_eager))
register(Impl(op="gated_residual", name="reference", rank=100, load=lambda: gated_residual_reference))
