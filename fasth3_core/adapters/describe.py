"""What an adapter file is, as plain data, from its header alone."""

from collections import Counter
from typing import Any

from ..checkpoint.problems import grouped, starred
from . import contract
from .file import Adapter
from .keys import ALPHA, DIFF, DOWN, SET


def describe_adapter(adapter: Adapter) -> dict[str, Any]:
    """Rank, kinds of tensors, layers, scale, and which base it fits."""
    record = contract.record(adapter)
    return {
        "format": adapter.metadata.get("format", "LoRA") if adapter.fastvideo else "LoRA",
        "ranks": dict(sorted(adapter.ranks().items())),
        "tensors": dict(adapter.roles().most_common()),
        "scale": _scale(adapter),
        "naming": dict(Counter(module.target.layout for module in adapter.modules).most_common()),
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
    adaln = {_inputs(adapter, m) for m in adapter.modules if "adaln_proj" in m.target.canonical} - {None}
    if adaln:
        inputs = ", ".join(map(str, sorted(adaln)))
        yield f"AdaLN of {inputs} inputs" + (
            ": full form, or a pruned one with its adaln_source" if max(adaln) > 256 else ": a pruned (curve) file"
        )
    embedder = any(m.target.canonical.startswith("time_embedder.") for m in adapter.modules)
    if embedder:
        yield "changes the time embedder, which a pruned (curve) file lacks without adaln_source"
    gates = sum(SET in m.tensors and m.target.canonical.endswith("to_gate_compress") for m in adapter.modules)
    if gates:
        yield f"brings VSA gates for {gates} blocks: a base without them, under a sparse contract"
    heads = any(m.target.canonical.startswith("final_layer.") and ALPHA in m.tensors for m in adapter.modules)
    if heads:
        yield "changes the output heads"


def _inputs(adapter: Adapter, module) -> int | None:
    name = module.tensors.get(DOWN) or module.tensors.get(DIFF)
    shape = adapter.stored(name).shape if name else ()
    return shape[1] if len(shape) == 2 else None
