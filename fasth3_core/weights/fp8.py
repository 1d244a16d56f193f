"""The large projections of the main blocks in 8 bits, made when they are read: `dtype="fp8"`.

Products then take both sides in float8_e4m3fn with one scale a row, the activations quantised as they come.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...kernels.quantise_rows import QuantisedRows, quantise_rows
from ..checkpoint.kinds import Entry
from ..checkpoint.quant import QuantizedWeight
from ..checkpoint.reading import Reader

FP8 = "fp8"

_LAYERS = re.compile(
    r"blocks\.\d+\.(attn\.(qkv_proj|to_gate_compress|out_proj)|mlp\.fc[12])\.weight"
)
"""999 of 1000 operations of a block. Norms, AdaLN, embeddings, the token refiner and the heads keep their dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A weight [out, in] that is multiplied in fp8 with activations in fp8."""

    rows: QuantisedRows
    dtype: torch.dtype
    """Of the products."""

    @property
    def data(self) -> torch.Tensor:
        """float8_e4m3fn [out, in]."""
        return self.rows.data

    @property
    def shape(self) -> torch.Size:
        return self.rows.data.shape

    @property
    def device(self) -> torch.device:
        return self.rows.data.device

    @property
    def nbytes(self) -> int:
        return self.rows.data.nbytes + self.rows.scale.nbytes

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        return self.rows.dequantise(dtype)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor that it holds, in the order that `with_tensors` takes them."""
        return self.rows.data, self.rows.scale

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "Fp8Weight":
        """The same weight over other tensors of the same shapes, such as copies on another device."""
        return Fp8Weight(QuantisedRows(*tensors), self.dtype)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Fp8Weight":
        return self.with_tensors([t.to(device, non_blocking=non_blocking) for t in self.tensors()])


def to_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Quantise a float weight where it is; its dtype is that of the products."""
    return Fp8Weight(quantise_rows(weight, FP8), weight.dtype)


@dataclass(frozen=True)
class Fp8Entry:
    """An entry whose weight is quantised on the reader's device as soon as it is there; a file's own float8_e4m3fn with
    scales is kept as it is."""

    inner: Entry

    @property
    def dtype(self) -> str:
        return "F8_E4M3"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    def nbytes(self, dtype: torch.dtype | None) -> int:
        """Bytes once loaded; the dtype of the run does not change them."""
        rows, columns = self.shape
        return rows * columns + 4 * rows

    def load(self, reader: Reader, dtype: torch.dtype | None = None) -> Fp8Weight:
        weight = self.inner.load(reader, dtype)
        if isinstance(weight, QuantizedWeight) and weight.data.dtype == torch.float8_e4m3fn:
            return Fp8Weight(QuantisedRows(weight.data, weight.scale), dtype or torch.float32)
        if not isinstance(weight, torch.Tensor):
            weight = weight.dequantise(dtype or torch.float32)
        return to_fp8(weight)


def fp8_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The same entries, those of the blocks' projections as `Fp8Entry`."""
    return {name: Fp8Entry(entry) if is_projection(name) else entry for name, entry in entries.items()}


def is_projection(name: str) -> bool:
    """Whether a canonical weight is one that `dtype="fp8"` quantises."""
    return _LAYERS.fullmatch(name) is not None
