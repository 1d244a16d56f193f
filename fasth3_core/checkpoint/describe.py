"""What a file is, as plain data: for `inspect`, for bug reports, for anybody who wonders before loading 66 GB."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..adapters.describe import describe_adapter
from ..adapters.file import open_adapter
from ..config import DiTConfig
from ..contracts import CONTRACTS, chosen_by, infer
from ..errors import FastH3Error
from ..weights.store import FileStore
from . import audio_names, names, vae_names
from .component import OFFICIAL_PARTITIONS, SUFFIX, Component, open_component
from .kinds import Plan
from .load import AUDIO_VAE_FOLDERS, TRANSFORMER_FOLDERS, VIDEO_VAE_FOLDERS, recorded_contract
from .problems import starred
from .recognise import SORTS, recognise

_FOLDERS = (*TRANSFORMER_FOLDERS, *VIDEO_VAE_FOLDERS, *AUDIO_VAE_FOLDERS)


def components(path: str | Path) -> list[Path]:
    """The components at `path`: itself, or those in the folders of a repository."""
    path = Path(path)
    if not path.is_dir() or any(path.glob("*" + SUFFIX)):
        return [path]
    roots = [path, *(path / name for name in OFFICIAL_PARTITIONS)]
    return [root / name for root in roots for name in _FOLDERS if (root / name).is_dir()] or [path]


def describe(path: str | Path, layout: str = "auto") -> dict[str, Any]:
    """Describe one component. Reads headers, and of the gates as much as tells whether they are zero.

    Raises:
        CheckpointError: it cannot be read, or is an H3 component that is not whole.
    """
    component = open_component(path, TRANSFORMER_FOLDERS)
    sort, _ = recognise(component.tensors, component.metadata)
    facts: dict[str, Any] = {
        "path": str(component.root),
        "component": sort,
        "files": len(component.files),
        "bytes": component.nbytes,
        "tensors": len(component.tensors),
        "dtypes": dict(Counter(stored.dtype for stored in component.tensors.values()).most_common()),
    }
    if sort == "transformer":
        facts |= _transformer(component, layout)
    elif sort == "video VAE":
        plan = vae_names.plan_video_vae(component)
        facts |= _plan(plan) | {
            "decoder_blocks": vae_names.decoder_blocks(plan),
            "decoder_width": plan.shapes["decoder.proj_in.weight"][0],
            "encoder": "encoder.conv_in.weight" in plan.entries,
        }
    elif sort == "adapter":
        facts |= {"adapter": describe_adapter(open_adapter(component.root))}
    elif sort == "audio VAE":
        plan = audio_names.plan_audio_vae(component)
        facts |= _plan(plan) | {"encoder": "encoder.block.0.weight" in plan.entries}
    else:
        known = next((known for known in SORTS if known.name == sort), None)
        facts["note"] = f"{known.what}; it {known.place}" if known else "not a component that this package loads"
    if component.metadata:
        facts["metadata"] = component.metadata
    return facts


def _plan(plan: Plan) -> dict[str, Any]:
    classes: dict[str, Counter[str]] = {}
    for layer, spec in plan.quantised.items():
        classes.setdefault(starred(layer), Counter())[spec.name] += 1
    return {
        "layout": plan.layout,
        "prefix": plan.prefix,
        "quantisation": {layer: dict(counts) for layer, counts in classes.items()},
        "ignored": list(plan.ignored),
    }


def _transformer(component: Component, layout: str) -> dict[str, Any]:
    plan = names.plan_transformer(component, layout)
    config = DiTConfig.from_shapes(plan.shapes, component.config)
    store = FileStore(component, plan, config)
    gates_zero = store.gates_all_zero()
    recorded = recorded_contract(component)
    return _plan(plan) | {
        "dimensions": asdict(config),
        "gates": "none" if gates_zero is None else "all zero" if gates_zero else "trained",
        "contract": _contract(config, gates_zero, recorded),
        "bytes_in_memory": {
            dtype: FileStore(component, plan, config, dtype).nbytes() for dtype in ("bf16", "fp32")
        },
    }


def _contract(config: DiTConfig, gates_zero: bool | None, recorded) -> dict[str, Any]:
    """What "auto" decides, or why it cannot, and which contracts fit when asked for by name."""
    fits = []
    for name in CONTRACTS:
        try:
            infer(config, gates_zero=gates_zero, recorded=recorded, requested=name)
            fits.append(name)
        except FastH3Error:
            continue
    try:
        auto, why = infer(config, gates_zero=gates_zero, recorded=recorded).name, ""
    except FastH3Error as error:
        auto, why = None, str(error)
    by = chosen_by(config, recorded, "auto") if auto else ""
    return {"auto": auto, "by": by, "why_not": why, "candidates": fits, "recorded": recorded is not None}
