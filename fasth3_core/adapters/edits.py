"""What an adapter does to one canonical tensor. Values are fp32 and in place; the caller rounds once, at the end."""

from dataclasses import dataclass

import torch

from ...kernels.precision import full_precision_matmul
from ..checkpoint.reading import Reader
from ..checkpoint.rows import Assembly
from .projection import Projection
from .weight import Increment


@dataclass(frozen=True, slots=True)
class LowRank:
    """W[start:] += scale * up @ down."""

    down: Assembly
    """[rank, in]"""
    up: Assembly
    """[rows, rank], rows in canonical order."""
    scale: float
    start: int
    projection: Projection | None = None
    """From the input width of the factors to the weight's, where they differ."""

    order = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        columns = self.projection.narrow if self.projection else self.down.shape[1]
        return dtype.itemsize * self.up.shape[1] * (columns + self.up.shape[0])

    def increment(self, reader: Reader, dtype: torch.dtype) -> Increment:
        if self.projection is None:
            down = self.down.load(reader, dtype)
        else:
            down = self.projection.apply(self.down.load(reader, torch.float32), reader).to(dtype)
        return Increment(down, self.up.load(reader, dtype), self.scale, self.start)

    def apply(self, weight: torch.Tensor, reader: Reader) -> None:
        self.increment(reader, torch.float32).add_to_weight(weight)


@dataclass(frozen=True, slots=True)
class Added:
    """W[start:] += strength * values."""

    values: Assembly
    strength: float
    start: int
    projection: Projection | None = None

    order = 1

    def apply(self, weight: torch.Tensor, reader: Reader) -> None:
        values = self.values.load(reader, torch.float32)
        if self.projection is not None:
            values = self.projection.apply(values, reader)
        weight[self.start : self.start + values.shape[0]].add_(values, alpha=self.strength)


@dataclass(frozen=True, slots=True)
class Assigned:
    """W[start:] = values at strength 1; in between, on the line from W to the values."""

    values: Assembly
    strength: float
    start: int

    order = 2

    def apply(self, weight: torch.Tensor, reader: Reader) -> None:
        values = self.values.load(reader, torch.float32)
        weight[self.start : self.start + values.shape[0]].lerp_(values, self.strength)


@dataclass(frozen=True, slots=True)
class Shifted:
    """b[start:] += what the mean of the inputs, which a centred basis leaves to the bias, gives under another edit."""

    edit: LowRank | Added
    order = 0

    @property
    def start(self) -> int:
        return self.edit.start

    def apply(self, bias: torch.Tensor, reader: Reader) -> None:
        mean = self.edit.projection.mean.to(bias.device)
        with full_precision_matmul():
            if isinstance(self.edit, LowRank):
                down, up = (part.load(reader, torch.float32) for part in (self.edit.down, self.edit.up))
                shift, strength = up @ (down @ mean), self.edit.scale
            else:
                shift, strength = self.edit.values.load(reader, torch.float32) @ mean, self.edit.strength
        bias[self.start : self.start + shift.shape[0]].add_(shift, alpha=strength)


Edit = LowRank | Added | Assigned | Shifted
