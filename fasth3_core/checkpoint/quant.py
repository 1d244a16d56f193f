"""Quantised weights: which layers of a file are quantised and how, and the values once loaded.

Read: `int8_tensorwise` (one scale for each output row, optionally stored in a rotated basis, "convrot") and
`float8_e4m3fn` / `float8_e5m2` with scales, marked by `<layer>.comfy_quant` (JSON bytes) or by the older header entry
`_quantization_metadata`. Everything else is refused by name.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.int8_linear import dequantise_int8
from ..errors import CheckpointError
from .dtypes import TORCH
from .files import Stored
from .reading import Reader
from .rows import Assembly

FORMATS = {"int8_tensorwise": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""Format -> dtype of its weight."""

_SUPPORTED = (
    "Read are int8_tensorwise (with or without convrot) and float8 with scales: "
    "use the bf16, int8_convrot or fp8_scaled file of the same release."
)
_DEFAULT_GROUP = 256
_KNOWN_FIELDS = {
    "format", "convrot", "convrot_groupsize", "params", "full_precision_matrix_mult", "orig_dtype", "orig_shape",
}  # fmt: skip
"""Fields of a marker; the last three say how to multiply, not what the weight is."""


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
            fields |= {"convrot": self.group is not None, "convrot_groupsize": self.group or _DEFAULT_GROUP}
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

    def rows(self, start: int, stop: int) -> "QuantizedWeight":
        """Output rows [start, stop) as views, for parts of a fused layer."""
        return replace(self, data=self.data[start:stop], scale=self.scale[start:stop])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "QuantizedWeight":
        data, scale = (t.to(device, non_blocking=non_blocking) for t in (self.data, self.scale))
        return replace(self, data=data, scale=scale)


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


def find_specs(
    label: str,
    tensors: Mapping[str, Stored],
    metadata: Mapping[str, str],
    config: Mapping[str, Any] | None,
    read_bytes: Callable[[str], bytes],
    prefix: str = "",
) -> dict[str, Spec]:
    """Layer -> spec for every quantised layer.

    Args:
        tensors: names without `prefix`.
        read_bytes: the value of a uint8 tensor; the markers are the only values this reads.

    Raises:
        CheckpointError: a format that is not read, or a marker, weight and scale that do not belong together.
    """
    markers = _header_markers(label, metadata, prefix)
    for name in tensors:
        if name.endswith(".comfy_quant"):
            markers[name.removesuffix(".comfy_quant")] = _decode(label, name, read_bytes(name))
    foreign = Counter(_foreign(tensors, markers))
    foreign.update(f"{fields.get('format')!r}" for fields in markers.values() if fields.get("format") not in FORMATS)
    if foreign:
        method = ((config or {}).get("quantization_config") or {}).get("quant_method")
        listing = ", ".join(f"{count} layers {what}" for what, count in foreign.most_common())
        by = f" (made by {method})" if method else ""
        raise CheckpointError(f"{label} is quantised in a form that is not read: {listing}{by}. {_SUPPORTED}")
    specs = {layer: _spec(label, layer, fields) for layer, fields in markers.items()}
    by_dtype = {dtype: name for name, dtype in FORMATS.items() if dtype.startswith("F8")}
    for name, stored in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and stored.dtype in by_dtype and f"{layer}.weight_scale" in tensors:
            specs.setdefault(layer, Spec(by_dtype[stored.dtype]))
    for layer, spec in specs.items():
        _check(label, layer, spec, tensors)
    return specs


_NAMED = (
    (re.compile(r"\.weight_scale_2$"), "NVFP4"),
    (re.compile(r"\.(qweight|qzeros)$"), "AWQ or GPTQ (4 bit)"),
    (re.compile(r"\.(absmax|quant_map|quant_state\..*)$"), "bitsandbytes"),
    (re.compile(r"\.(weight_s_rel|weight_s_channel|weight_codebook)$"), "asym_w4a8_int8 (4 bit)"),
    (re.compile(r"\.(svd_up|svd_down|smooth_factor|wscales)$"), "SVDQuant (4 bit)"),
)


def _foreign(tensors: Mapping[str, Stored], markers: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """Signs of unread formats on layers without a marker: what -> number of layers."""
    layers: dict[str, str] = {}
    for name, stored in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if layer in markers:
            continue
        for pattern, what in _NAMED:
            if pattern.search(name):
                layers[layer] = what
        if leaf == "weight" and stored.dtype not in ("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"):
            layers.setdefault(layer, "int8 without a marker" if stored.dtype == "I8" else f"packed as {stored.dtype}")
    return Counter(layers.values())


def _header_markers(label: str, metadata: Mapping[str, str], prefix: str) -> dict[str, dict[str, Any]]:
    if "_quantization_metadata" not in metadata:
        return {}
    try:
        layers = json.loads(metadata["_quantization_metadata"])["layers"]
        return {layer.removeprefix(prefix): dict(fields) for layer, fields in layers.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{label}: _quantization_metadata is not readable ({error}).") from error


def _decode(label: str, name: str, raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{label}: {name} is not readable ({error}).") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{label}: {name} holds {fields!r}, expected an object with a format.")
    return fields


def _spec(label: str, layer: str, fields: dict[str, Any]) -> Spec:
    if strange := sorted(set(fields) - _KNOWN_FIELDS):
        raise CheckpointError(f"{label}: {layer} is quantised with unknown settings {strange}. {_SUPPORTED}")
    fields = {**(fields.get("params") or {}), **fields}
    if fields["format"] != "int8_tensorwise" or not fields.get("convrot", False):
        return Spec(fields["format"])
    return Spec(fields["format"], int(fields.get("convrot_groupsize", _DEFAULT_GROUP)))


def _check(label: str, layer: str, spec: Spec, tensors: Mapping[str, Stored]) -> None:
    weight, scale = tensors.get(f"{layer}.weight"), tensors.get(f"{layer}.weight_scale")
    if weight is None or scale is None:
        part = "weight" if weight is None else "weight_scale"
        raise CheckpointError(f"{label}: {layer} is marked as {spec.name} but has no {part}. Download the file again.")
    if weight.dtype != FORMATS[spec.format] or len(weight.shape) != 2:
        raise CheckpointError(
            f"{label}: {layer} is marked as {spec.name}, but its weight is {weight.dtype} {list(weight.shape)}, "
            f"expected {FORMATS[spec.format]} [out, in]."
        )
    rows, columns = weight.shape
    if scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)) or scale.dtype not in TORCH:
        raise CheckpointError(
            f"{label}: {layer}.weight_scale is {scale.dtype} {list(scale.shape)}; expected one number, or one for each "
            f"of {rows} rows."
        )
    if spec.group is not None:
        power_of_four = spec.group >= 4 and spec.group & (spec.group - 1) == 0 and spec.group.bit_length() % 2 == 1
        if not power_of_four or columns % spec.group:
            raise CheckpointError(
                f"{label}: {layer} is rotated in groups of {spec.group}; expected a power of four that divides its "
                f"{columns} input channels."
            )


def is_scalar(stored: Stored) -> bool:
    """Whether a scale is one number for the whole weight."""
    return all(n == 1 for n in stored.shape)
