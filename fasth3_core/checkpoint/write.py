"""From canonical tensors in memory back to the names and row orders of a layout."""

from collections.abc import Mapping

import torch

from .dtypes import NAMES
from .kinds import Kind, join, split
from .quant import QuantizedWeight
from .reading import MemoryReader
from .rows import Assembly, Group, canonical_order, cut, stored_order


def restore(
    tensors: Mapping[str, torch.Tensor | QuantizedWeight], kind: Kind, layout: str
) -> dict[str, torch.Tensor]:
    """Stored names -> tensors. Quantised weights become weight, scale and marker."""
    flat: dict[str, torch.Tensor] = {}
    markers: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, QuantizedWeight):
            layer = split(name)[0]
            flat[name], flat[join(layer, "weight_scale")] = value.data, value.scale
            markers[layer] = value.spec.marker()
        else:
            flat[name] = value
    out: dict[str, torch.Tensor] = {}
    for name in flat:
        layer, leaf = split(name)
        group = kind.group(layer, layout)
        if layer != group.canonical[0]:
            continue  # made with the first of its group
        out |= _restore_group(flat, kind, group, leaf)
        if layer in markers and leaf == "weight":
            out |= {join(stored, "comfy_quant"): markers[layer] for stored in group.source}
    return out


def _restore_group(flat: Mapping[str, torch.Tensor], kind: Kind, group: Group, leaf: str) -> dict[str, torch.Tensor]:
    inputs = [join(layer, leaf) for layer in group.canonical]
    outputs = [join(layer, leaf) for layer in group.source]
    first = flat[inputs[0]]
    if first.ndim == 0 or (group.rule == "same" and inputs == outputs):
        return {outputs[0]: first}
    rows = first.shape[0] * len(inputs)
    head_dim = 0
    if group.rule == "heads":
        shapes = {name: Assembly(NAMES[t.dtype], tuple(t.shape), ()) for name, t in flat.items()}
        head_dim = kind.head_dim(group.canonical[0], shapes, {})
    pieces = cut(stored_order(canonical_order(group.rule, rows, head_dim)), inputs, outputs, rows)
    reader = MemoryReader(flat, first.device)
    shape = (rows // len(outputs), *first.shape[1:])
    return {name: Assembly(NAMES[first.dtype], shape, parts).load(reader) for name, parts in pieces.items()}
