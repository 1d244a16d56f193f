"""int8_linear: y = x Wᵀ + b with W stored as int8 rows, optionally rotated (ConvRot)."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import dequantise_int8_eager, int8_linear_eager
from .reference import dequantise_int8_reference, hadamard, int8_linear_reference

__all__ = [
    "dequantise_int8",
    "dequantise_int8_reference",
    "hadamard",
    "int8_linear",
    "int8_linear_eager",
    "int8_linear_reference",
]


def dequantise_int8(
    weight: torch.Tensor, scale: torch.Tensor, group: int | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight [O, I] that int8 rows stand for, computed in fp32 and rounded to `dtype` once.

    Args:
        weight: [O, I] int8.
        scale: [O] or [O, 1] float, one a row.
        group: input features that were rotated together by a Hadamard matrix (256 in ConvRot files); None for none.

    Raises:
        ValueError: group does not divide I or is no power of four.
    """
    _check(weight, group)
    return dequantise_int8_eager(weight, scale, group, dtype)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: int | None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Project with an int8 weight; activations stay in x's dtype (W8A16).

    Args:
        x: [..., I] float.
        weight, scale, group: as for `dequantise_int8`.
        bias: [O] in x's dtype, not rotated, or None.
        out: [..., O] of x's dtype, contiguous, to write the result into; None makes a new one.

    Returns:
        [..., O] in x's dtype.

    Raises:
        ValueError: group does not divide I or is no power of four.
        BackendUnavailable: the named backend cannot take x.
    """
    _check(weight, group)
    return resolve("int8_linear", backend, Case.of(x))(x, weight, scale, bias, group, out=out)


def _check(weight: torch.Tensor, group: int | None) -> None:
    if group is None:
        return
    if group < 1 or group & (group - 1) or group.bit_length() % 2 == 0 or weight.shape[1] % group:
        raise ValueError(
            f"int8_linear: rotation group {group} for {weight.shape[1]} input features; "
            "expected a power of four that divides them, or None"
        )


def _load_triton():
    from .triton_kernel import int8_linear_triton

    return int8_linear_triton


register(Impl(op="int8_linear", name="triton", rank=10, load=_load_triton, why_not=triton_why_not))
register(Impl(op="int8_linear", name="eager", rank=50, load=lambda: int8_linear_eager))
register(Impl(op="int8_linear", name="reference", rank=100, load=lambda: int8_linear_reference))
