"""Which layers of a file are quantised, and how.

Read are `int8_tensorwise`, with or without convrot, and `float8_e4m3fn` / `float8_e5m2` with scales, marked by
`<layer>.comfy_quant` (JSON bytes) or by the older header entry `_quantization_metadata`. All else is refused by name.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CheckpointError
from .dtypes import TORCH
from .files import Stored
from .quant import DEFAULT_GROUP, FORMATS, Spec

_SUPPORTED = (
    "Read are int8_tensorwise (with or without convrot) and float8 with scales: "
    "use the bf16, int8_convrot or fp8_scaled file of the same release, or make one from bf16: command 'quantize'."
)
_KNOWN_FIELDS = {
    "format", "convrot", "convrot_groupsize", "full_precision_matrix_mult", "orig_dtype", "orig_shape",
}  # fmt: skip
"""Fields of a marker; the last three say how to multiply, not what the weight is."""


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
    marked = [fields.get("format") for fields in markers.values()]
    foreign.update(repr(format) for format in marked if format not in list(FORMATS))
    if foreign:
        settings = (config or {}).get("quantization_config")
        method = settings.get("quant_method") if isinstance(settings, dict) else None
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
    params = fields.get("params") or {}
    if isinstance(params, dict):
        fields = params | {key: value for key, value in fields.items() if key != "params"}
    group = fields.get("convrot_groupsize", DEFAULT_GROUP)
    strange = [key for key in fields if key not in _KNOWN_FIELDS]
    strange += [] if type(group) is int else ["convrot_groupsize"]
    if strange:
        raise CheckpointError(f"{label}: {layer} is quantised with unknown settings {strange}. {_SUPPORTED}")
    if fields["format"] != "int8_tensorwise" or not fields.get("convrot", False):
        return Spec(fields["format"])
    return Spec(fields["format"], group)


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
