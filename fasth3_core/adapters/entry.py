"""A canonical tensor with an adapter applied when it is loaded."""

import math
from dataclasses import dataclass

import torch

from ..checkpoint.dtypes import TORCH
from ..checkpoint.kinds import Entry
from ..checkpoint.reading import Reader
from .edits import Edit, LowRank
from .weight import AdaptedWeight


@dataclass(frozen=True, slots=True)
class AdaptedEntry:
    """Merged into the base in fp32 and rounded once; or, when `beside`, kept with the base as increments."""

    base: Entry | None
    """None for a tensor that the adapter creates."""
    edits: tuple[Edit, ...]
    """In order: low-rank products, differences, assignments."""
    dtype: str
    shape: tuple[int, ...]
    beside: bool = False

    def nbytes(self, dtype: torch.dtype | None) -> int:
        if self.beside:
            held = self._factor_dtype(dtype)
            return self.base.nbytes(dtype) + sum(edit.nbytes(held) for edit in self.edits)
        return math.prod(self.shape) * (dtype or TORCH[self.dtype]).itemsize

    def load(self, reader: Reader, dtype: torch.dtype | None = None) -> torch.Tensor | AdaptedWeight:
        """The tensor, on the reader's device, in `dtype` or as stored.

        Raises:
            CheckpointError: a scale of a quantised base is none.
        """
        with reader.as_one(self.nbytes(dtype)):
            return self._beside(reader, dtype) if self.beside else self._merged(reader, dtype)

    def is_zero(self, reader: Reader) -> bool:
        """Whether every value is zero."""
        value = self.load(reader, torch.float32)
        return not bool((value.dequantise(torch.float32) if isinstance(value, AdaptedWeight) else value).any())

    def _merged(self, reader: Reader, dtype: torch.dtype | None) -> torch.Tensor:
        if self.base is None:
            value = torch.zeros(self.shape, dtype=torch.float32, device=reader.device)
        else:
            value = self.base.load(reader, torch.float32)
            value = value if isinstance(value, torch.Tensor) else value.dequantise(torch.float32)
        for edit in self.edits:
            edit.apply(value, reader)
        return value.to(dtype or TORCH[self.dtype])

    def _beside(self, reader: Reader, dtype: torch.dtype | None) -> AdaptedWeight:
        base = self.base.load(reader, dtype)
        added = tuple(edit.increment(reader, self._factor_dtype(dtype)) for edit in self.edits)
        if isinstance(base, AdaptedWeight):
            return AdaptedWeight(base.base, base.increments + added)
        return AdaptedWeight(base, added)

    def _factor_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Factors are multiplied with activations: in the dtype of the run, else of their file."""
        return dtype or TORCH[self.edits[0].up.dtype]


def adapted(
    base: Entry | None, edits: list[Edit], dtype: str, shape: tuple[int, ...], beside: bool
) -> AdaptedEntry:
    """`beside` holds only where every edit is a low-rank product; differences and assignments are merged."""
    edits = sorted(edits, key=lambda edit: edit.order)
    return AdaptedEntry(base, tuple(edits), dtype, shape, beside and all(isinstance(e, LowRank) for e in edits))
