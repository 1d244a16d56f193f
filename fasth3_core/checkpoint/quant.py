"""Quantised weights: int8 with a scale for each output row, optionally in a rotated basis ("convrot"), and float8."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.int8_linear import dequantise_int8
from ..errors import CheckpointError
from .files import Stored
from .reading import Reader
from .rows import Assembly

FORMATS = {"int8_tensorwise": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""Format -> dtype of its weight."""

DEFAULT_GROUP = 256
"""Channels rotated together where a marker does not say."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How one layer is quantised."""

    format: str
    group: int | None = None
    """Input channels that are rotated together; None when the weight is not rotated."""

    @property
    def name(self) -> str:
        return self.format if self.group is None else f"{self.format} convrot {self.group}"

    def marker(self) -> torch.Tensor:
        """The bytes of `comfy_quant`, uint8."""
        fields: dict[str, Any] = {"format": self.format}
        if self.format == "int8_tensorwise":
            fields |= {"convrot": self.group is not None, "convrot_groupsize": self.group or DEFAULT_GROUP}
        return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out, in] that stays quantised in memory."""

    data: torch.Tensor
    """int8 or float8 [out, in]; rotated along `in` when there is a group."""
    scale: torch.Tensor
    """fp32 [out, 1]."""
    format: str
    group: int | None = None
    """Input channels that are rotated together; None when the weight is not rotated."""

    @property
    def spec(self) -> Spec:
        return Spec(self.format, self.group)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as a plain tensor: products in fp32, rounded to `dtype` once."""
        if self.format == "int8_tensorwise":
            return dequantise_int8(self.data, self.scale, self.group, dtype)
        return (self.data.float() * self.scale).to(dtype)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor that it holds, in the order that `with_tensors` takes them."""
        return self.data, self.scale

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "QuantizedWeight":
        """The same weight over other tensors of the same shapes, such as copies on another device."""
        data, scale = tensors
        return replace(self, data=data, scale=scale)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "QuantizedWeight":
        return self.with_tensors([t.to(device, non_blocking=non_blocking) for t in self.tensors()])


@dataclass(frozen=True, slots=True)
class QuantAssembly:
    """A quantised weight that is made from pieces when it is loaded; weight and scale go through the same pieces."""

    data: Assembly
    scales: Mapping[str, tuple[str, bool]]
    """Stored weight -> (its stored scale, whether that is one number for all rows)."""
    spec: Spec

    @property
    def dtype(self) -> str:
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def nbytes(self, dtype: torch.dtype | None) -> int:
        """Bytes once loaded; the dtype of the run does not change them."""
        return self.data.nbytes(None) + 4 * self.shape[0]

    def load(self, reader: Reader, dtype: torch.dtype | None = None) -> QuantizedWeight:
        """The weight on the reader's device, still quantised whatever `dtype` is.

        Raises:
            CheckpointError: a scale is not a positive finite number.
        """
        scale = torch.empty(self.shape[0], 1, dtype=torch.float32, device=reader.device)
        at = 0
        for piece in self.data.pieces:
            name, scalar = self.scales[piece.source]
            rows = scale[at : at + piece.count]
            if scalar:
                reader.rows(name, 0, rows[:1])
                rows[1:] = rows[0]
            else:
                reader.rows(name, piece.start, rows)
            at += piece.count
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            names = ", ".join(sorted({name for name, _ in self.scales.values()}))
            raise CheckpointError(f"{names}: a scale is zero, negative or not finite. Download the file again.")
        return QuantizedWeight(self.data.load(reader), scale, self.spec.format, self.spec.group)


def is_scalar(stored: Stored) -> bool:
    """Whether a scale is one number for the whole weight."""
    return all(n == 1 for n in stored.shape)
