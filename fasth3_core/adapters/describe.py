"""What an adapter file is, as plain data, from its header alone."""

from collections import Counter
from typing import Any

from ..checkpoint import names
from ..checkpoint.problems import grouped, starred
from . import contract
from .file import Adapter, Module
from .keys import ALPHA, DIFF, DOWN, SET


def describe_adapter(adapter: Adapter) -> dict[str, Any]:
    """Rank, kinds of tensors, layers, scale, and which base it fits."""
    record = contract.record(adapter)
    return {
        "format": adapter.metadata.get("format", "LoRA") if adapter.fastvideo else "LoRA",
        "ranks": dict(sorted(adapter.ranks().items())),
        "tensors": dict(adapter.roles().most_common()),
        "scale": _scale(adapter),
        "naming": dict(Counter(m.target.layout for m in adapter.modules if not _same_in_both(m)).most_common()),
        "layers": dict(Counter(starred(module.target.canonical) for module in adapter.modules)),
        "unknown": [*grouped(adapter.unknown, "of no layer of MiniMax-H3")],
        "fits": "; ".join(_fits(adapter)),
        "gates": sum(SET in m.tensors and m.target.canonical.endswith("to_gate_compress") for m in adapter.modules),
        "contract": contract.student(adapter) or ("as its metadata says" if record else None),
    }


def _scale(adapter: Adapter) -> str:
    scales = Counter(adapter.scale(module) for module in adapter.modules if DOWN in module.tensors)
    listed = (f"{scale:g} from {source} ({count} pairs)" for (scale, source), count in scales.most_common(3))
    more = f", and {len(scales) - 3} other scales" if len(scales) > 3 else ""
    return ", ".join(listed) + more or "none: it has no pairs"


_NARROW = 256
"""AdaLN inputs of a pruned file are far fewer (8 as published), of the full form more (2688)."""


def _fits(adapter: Adapter):
    """What can be said of the base from names and shapes."""
    if "base_model" in adapter.metadata:
        yield f"made for {adapter.metadata['base_model']}"
    blocks = {m.target.canonical.split(".")[1] for m in adapter.modules if m.target.canonical.startswith("blocks.")}
    if blocks:
        yield f"changes {len(blocks)} blocks, up to number {max(map(int, blocks))}"
    widths = Counter(_inputs(adapter, module) for module in adapter.modules if ".qkv_proj" in module.target.canonical)
    widths.pop(None, None)
    if widths:
        yield f"width {widths.most_common(1)[0][0]}"
    embedder = any(m.target.canonical.startswith("time_embedder.") for m in adapter.modules)
    adaln = {_inputs(adapter, m) for m in adapter.modules if "adaln_proj" in m.target.canonical} - {None}
    if adaln:
        full = embedder or max(adaln) > _NARROW
        form = "the full form, or a pruned (curve) file with its adaln_source" if full else "a pruned (curve) file"
        yield f"AdaLN of {', '.join(map(str, sorted(adaln)))} inputs: {form}"
    elif embedder:
        yield "changes the time embedder: the full form, or a pruned (curve) file with its adaln_source"
    gates = sum(SET in m.tensors and m.target.canonical.endswith("to_gate_compress") for m in adapter.modules)
    if gates:
        yield f"brings VSA gates for {gates} blocks: a base without them, under a sparse contract"
    heads = any(m.target.canonical.startswith("final_layer.") and ALPHA in m.tensors for m in adapter.modules)
    if heads:
        yield "changes the output heads"


def _same_in_both(module: Module) -> bool:
    return names.TRANSFORMER.canonical_of(module.target.layer, "diffusers") == module.target.layer


def _inputs(adapter: Adapter, module: Module) -> int | None:
    name = module.tensors.get(DOWN) or module.tensors.get(DIFF)
    shape = adapter.stored(name).shape if name else ()
    return shape[1] if len(shape) == 2 else None
