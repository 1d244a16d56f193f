"""A weight in memory that keeps an adapter beside it: the base stays as it is, the increments are added to its result.

This is how a quantised weight carries an adapter. The increments see the activation as the layer is given it, never the
rotated one that an int8 ConvRot weight is multiplied with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.precision import full_precision_matmul


@dataclass(frozen=True, slots=True, eq=False)
class Increment:
    """scale * up @ down, added to some of the output rows of a weight."""

    down: torch.Tensor
    """[rank, in]"""
    up: torch.Tensor
    """[rows, rank]"""
    scale: float
    start: int
    """First output row that it adds to."""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.up.shape[0])

    def add_to_weight(self, weight: torch.Tensor) -> None:
        """In place on a fp32 weight [out, in]; the product is fp32."""
        with full_precision_matmul():
            weight[self.rows].addmm_(self.up.float(), self.down.float(), alpha=self.scale)

    def add_to_result(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """In place on y [S, out] for x [S, in], all in one dtype: the sum is accumulated in fp32 and rounded once."""
        y[:, self.rows].addmm_(F.linear(x, self.down), self.up.T, alpha=self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight:
    """A weight [out, in] with increments."""

    base: Any
    """A tensor, or a quantised weight."""
    increments: tuple[Increment, ...]
    """Factors in the dtype of the run."""

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + sum(inc.down.nbytes + inc.up.nbytes for inc in self.increments)

    def add_increments(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y = base(x) [..., out], contiguous, with what the increments make of x [..., in] added in place."""
        x, flat = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for increment in self.increments:
            increment.add_to_result(x, flat)
        return y

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The plain weight that it stands for: summed in fp32, rounded to `dtype` once."""
        base = self.base.float().clone() if isinstance(self.base, torch.Tensor) else self.base.dequantise(torch.float32)
        for increment in self.increments:
            increment.add_to_weight(base)
        return base.to(dtype)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor that it holds, in the order that `with_tensors` takes them."""
        base = (self.base,) if isinstance(self.base, torch.Tensor) else self.base.tensors()
        return (*base, *(t for inc in self.increments for t in (inc.down, inc.up)))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "AdaptedWeight":
        """The same weight over other tensors of the same shapes, such as copies on another device."""
        own = len(tensors) - 2 * len(self.increments)
        base = tensors[0] if isinstance(self.base, torch.Tensor) else self.base.with_tensors(tensors[:own])
        pairs = zip(self.increments, tensors[own::2], tensors[own + 1 :: 2], strict=True)
        return AdaptedWeight(base, tuple(replace(inc, down=down, up=up) for inc, down, up in pairs))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "AdaptedWeight":
        return self.with_tensors([t.to(device, non_blocking=non_blocking) for t in self.tensors()])
