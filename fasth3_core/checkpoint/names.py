"""Names of the transformer: three layouts on disk, one in memory.

In memory a transformer has the names and row orders of ComfyUI's single files. On disk:

- "single-file": the same names; q, k, v one after another in `qkv_proj`; the gate half first in `fc1`.
- "original": the same names, but `qkv_proj` holds q, k, v of each head in turn. Names and shapes cannot tell it from a
  single file, so it is taken only in the official folder tree, by the file's own metadata, or when asked for.
- "diffusers": other names, q, k, v as three tensors, the value half first. FastVideo's runtime spelling is read too.
"""

import re
from collections.abc import Mapping

import torch

from ..errors import CheckpointError
from .component import Component, in_official_tree
from .kinds import Entry, Kind, Plan, Source
from .plan import make_plan
from .quant import QuantizedWeight
from .reading import MemorySource
from .recognise import require
from .rows import Group
from .transformer_shapes import templates
from .write import restore

LAYOUTS = ("diffusers", "single-file", "original")

LAYOUT_KEY = "fasth3.layout"
"""Header metadata in which this package's writer states the layout."""

_TOP = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "token_refiner.final_norm": "token_refiner.final_norm",
    "final_layer.norm": "norm_out.norm",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
    "adaln_basis": "adaln_basis",
    "adaln_t_table": "adaln_t_table",
    "rope.inv_freq": "rope.inv_freq",
}
"""Canonical layer -> its name in the diffusers layout."""

_BLOCK = {
    "norm1": ("norm1",),
    "norm2": ("norm2",),
    "attn.qkv_proj": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.q_norm": ("attn.norm_q",),
    "attn.k_norm": ("attn.norm_k",),
    "attn.out_proj": ("attn.to_out.0",),
    "attn.to_gate_compress": ("attn.to_gate_compress",),
    "mlp.fc1": ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
    "adaln_proj.linear": ("adaln_proj.linear",),
}
"""The same for the layers of a block; q, k and v are three layers there."""

_STACKS = {"blocks": "transformer_blocks", "token_refiner.blocks": "token_refiner.refiner_blocks"}
_CANONICAL_BLOCK = re.compile(r"(blocks|token_refiner\.blocks)\.(\d+)\.(.+)")
_DIFFUSERS_BLOCK = re.compile(r"(transformer_blocks|token_refiner\.refiner_blocks)\.(\d+)\.(.+)")
_FROM_TOP = {theirs: ours for ours, theirs in _TOP.items()}
_FROM_BLOCK = {theirs: ours for ours, names in _BLOCK.items() for theirs in names}
_FROM_STACK = {theirs: ours for ours, theirs in _STACKS.items()}

_ALIASES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^time_embedder\.fc_in\.", "time_embedder.linear_1."),
        (r"^time_embedder\.fc_out\.", "time_embedder.linear_2."),
        (r"\.attn\.to_out\.(?!0\.)", ".attn.to_out.0."),
        (r"\.ff\.fc_in\.", ".ff.net.0.proj."),
        (r"\.ff\.fc_out\.", ".ff.net.2."),
        (r"\.scale_weight$", ".weight_scale"),
        (r"\.scale_input$", ".input_scale"),
    )
)


def _canonical_of(layer: str, layout: str) -> str | None:
    if layout != "diffusers":
        block = _CANONICAL_BLOCK.fullmatch(layer)
        return layer if layer in _TOP or (block and block[3] in _BLOCK) else None
    if block := _DIFFUSERS_BLOCK.fullmatch(layer):
        ours = _FROM_BLOCK.get(block[3])
        return ours and f"{_FROM_STACK[block[1]]}.{block[2]}.{ours}"
    return _FROM_TOP.get(layer)


def _group(canonical: str, layout: str) -> Group:
    if layout == "single-file":
        return Group((canonical,), (canonical,))
    if layout == "original":
        return Group((canonical,), (canonical,), "heads" if canonical.endswith(".attn.qkv_proj") else "same")
    if block := _CANONICAL_BLOCK.fullmatch(canonical):
        names = tuple(f"{_STACKS[block[1]]}.{block[2]}.{name}" for name in _BLOCK[block[3]])
        return Group((canonical,), names, "swap" if block[3] == "mlp.fc1" else "same")
    return Group((canonical,), (_TOP[canonical],))


def _underscored(layer: str) -> str:
    return layer.replace(".", "_")


_SPELLED = {"attn.to_out": "attn.to_out.0", "ff.fc_in": "ff.net.0.proj", "ff.fc_out": "ff.net.2"}
"""FastVideo's own spelling of layers of a block."""
_FLAT_TOP = {_underscored(name): name for names in (_TOP, _FROM_TOP) for name in names}
_FLAT_BLOCK = {_underscored(name): name for names in (_BLOCK, _FROM_BLOCK) for name in names}
_FLAT_BLOCK |= {_underscored(name): layer for name, layer in _SPELLED.items()}
_FLAT_STACK = {_underscored(name): name for names in (_STACKS, _FROM_STACK) for name in names}
_FLAT = re.compile(f"({'|'.join(sorted(_FLAT_STACK, key=len, reverse=True))})_([0-9]+)_(.+)")


def dotted(flat: str) -> str | None:
    """The layer, in either naming, of which `flat` is the name with underscores for dots; None if there is none."""
    if block := _FLAT.fullmatch(flat):
        layer = _FLAT_BLOCK.get(block[3])
        return layer and f"{_FLAT_STACK[block[1]]}.{block[2]}.{layer}"
    return _FLAT_TOP.get(flat)


def _head_dim(canonical: str, entries: Mapping[str, Entry], config: Mapping) -> int:
    norm = entries.get(canonical.replace("qkv_proj", "q_norm") + ".weight")
    return norm.shape[0] if norm else 0


TRANSFORMER = Kind(
    name="transformer",
    title="MiniMax-H3 transformer",
    canonical_of=_canonical_of,
    group=_group,
    templates=templates,
    head_dim=_head_dim,
    aliases=_ALIASES,
    ignored=frozenset({"scaled_fp8"}),
)


def find_layout(source: Source, names: set[str], layout: str) -> str:
    """The layout to read `names` (without prefix) in.

    Raises:
        CheckpointError: fused names in shards outside the official tree, which may be of either row order.
    """
    if layout not in ("auto", *LAYOUTS):
        raise CheckpointError(f"layout {layout!r}: expected 'auto' or one of {list(LAYOUTS)}.")
    split_names = any(name.startswith("transformer_blocks.") for name in names)
    if layout == "auto":
        stated = source.metadata.get(LAYOUT_KEY)
        layout = stated if stated in LAYOUTS else "diffusers" if split_names else ""
    if split_names != (layout == "diffusers") and layout:
        have = "diffusers" if split_names else "single-file or original"
        raise CheckpointError(f"{source.label} has {have} names; layout {layout!r} was asked for.")
    if layout:
        return layout
    if not isinstance(source, Component):
        return "single-file"
    if in_official_tree(source):
        return "original"
    if len(source.files) > 1:
        raise CheckpointError(
            f"{source.label}: the names fit both the original layout, whose qkv rows are stored head by head, and "
            "ComfyUI's, and shards outside FL2VA/transformer or Ref2VA/transformer come in either. "
            "Load it with layout='original' or layout='single-file'; the wrong one gives noise."
        )
    return "single-file"


def plan_transformer(source: Source, layout: str = "auto") -> Plan:
    """Canonical tensors of a transformer in any layout, described but not loaded.

    Raises:
        CheckpointError: another component, an ambiguous layout, or names and shapes that are not a transformer's.
    """
    prefix = require(source, "transformer")
    names = {name[len(prefix) :] for name in source.tensors if name.startswith(prefix)}
    plan = make_plan(source, TRANSFORMER, find_layout(source, names, layout), prefix)
    rows, head = plan.shapes["blocks.0.attn.qkv_proj.weight"][0], plan.shapes["blocks.0.attn.q_norm.weight"][0]
    if rows % (3 * head):
        raise CheckpointError(f"{source.label}: {rows} rows of q, k and v are no whole heads of width {head}.")
    return plan


def to_canonical(
    tensors: Mapping[str, torch.Tensor], layout: str = "auto"
) -> dict[str, torch.Tensor | QuantizedWeight]:
    """Convert tensors in memory, in their dtypes. "auto" takes fused names as single-file, never as original."""
    source = MemorySource(tensors)
    return plan_transformer(source, layout).load(source)


def from_canonical(
    tensors: Mapping[str, torch.Tensor | QuantizedWeight], layout: str
) -> dict[str, torch.Tensor]:
    """The inverse: tensors under the names and in the row order of `layout`.

    The diffusers layout does not store `rope.inv_freq`; it is left out there. A bank of output heads is written as it
    is: its two forms (see `FileStore.head_form`) differ in values, not in names or order.
    """
    if layout == "diffusers":
        tensors = {name: tensor for name, tensor in tensors.items() if name != "rope.inv_freq"}
    return restore(tensors, TRANSFORMER, layout)
