"""head_norm_rope: per-head RMSNorm without weight and rotation of neighbouring channel pairs, in place."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import head_norm_rope_eager
from .reference import head_norm_rope_reference

__all__ = ["head_norm_rope", "head_norm_rope_eager", "head_norm_rope_reference"]


def head_norm_rope(
    x: torch.Tensor, bias: torch.Tensor | None, rotations: torch.Tensor, eps: float, *, backend: str = "auto"
) -> None:
    """Add the bias, normalise every head, then turn the pairs (2i, 2i + 1); overwrites x.

    Args:
        x: [S, H, D], last dimension contiguous; queries and keys together are 2H heads of one slice of a product.
        bias: [H, D] contiguous, any float dtype, or None where the product has it.
        rotations: complex64 [N, D/2] of length 1, contiguous; row s takes rotation s % N, so that S is any number of
            sequences of N tokens. A pair that does not turn has 1.

    Raises:
        BackendUnavailable: the named backend cannot take x.
    """
    resolve("head_norm_rope", backend, Case.of(x))(x, bias, rotations, eps)


def triton_head_why_not(case: Case) -> str | None:
    D = case.head_dim
    return f"needs a head dim that is a power of two, got {D}" if D & (D - 1) else triton_why_not(case)


def _load_triton():
    from .triton_kernel import head_norm_rope_triton

    return head_norm_rope_triton


register(Impl(op="head_norm_rope", name="triton", rank=10, load=_load_triton, why_not=triton_head_why_not))
register(Impl(op="head_norm_rope", name="eager", rank=50, load=lambda: head_norm_rope_eager))
register(Impl(op="head_norm_rope", name="reference", rank=100, load=lambda: head_norm_rope_reference))
