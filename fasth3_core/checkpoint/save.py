"""Writing a component in any layout: one file, or shards with their index, each under a temporary name first."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..atomic import replacing
from ..errors import CheckpointError
from . import audio_names, names, vae_names
from .component import INDEX_SUFFIX, SUFFIX
from .quant import QuantizedWeight
from .recognise import recognise

_STEM = "diffusion_pytorch_model"


def save(
    tensors: Mapping[str, torch.Tensor | QuantizedWeight],
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    *,
    layout: str = "single-file",
    shards: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write canonical tensors of a transformer, video VAE or audio VAE.

    Args:
        path: a `.safetensors` file, or a folder, which gets `diffusion_pytorch_model*.safetensors`.
        layout: a name of the component's LAYOUTS.
        shards: 0 for one file; from 1, that many shards and an index, in a folder.
        config: written as `config.json` beside the weights.

    Returns:
        `path`, which `open_component` opens.

    Raises:
        CheckpointError: the tensors are of none of the three, the layout is not theirs, or shards go into a file.
    """
    path = Path(path)
    stored, header = _stored(tensors, layout)
    header |= metadata or {}
    folder = path.parent if path.suffix == SUFFIX else path
    if shards and folder != path:
        raise CheckpointError(f"{path}: {shards} shards need a folder, not the name of a file.")
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        _write_json(folder / "config.json", dict(config))
    if not shards:
        _write(stored, path if folder != path else folder / f"{_STEM}{SUFFIX}", header)
        return path
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_split(stored, shards), 1):
        name = f"{_STEM}-{number:05d}-of-{shards:05d}{SUFFIX}"
        _write(part, folder / name, header)
        weight_map |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in stored.values())
    _write_json(folder / f"{_STEM}{INDEX_SUFFIX}", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return path


def _stored(tensors: Mapping[str, Any], layout: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    sort, _ = recognise(tensors, {})
    if sort == "transformer":
        return names.from_canonical(tensors, layout), {names.LAYOUT_KEY: layout}
    if sort == "video VAE":
        return vae_names.from_canonical(tensors, layout), {}
    if sort == "audio VAE":
        return audio_names.from_canonical(tensors, layout), {}
    raise CheckpointError("the tensors are neither a transformer's nor a VAE's in canonical names; nothing is written.")


def _split(tensors: Mapping[str, torch.Tensor], shards: int) -> list[dict[str, torch.Tensor]]:
    """Shards of about equal size, in order; none is empty as long as there are as many tensors."""
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    left = len(tensors)
    at = 0
    for name, tensor in tensors.items():
        full = done >= (at + 1) * total / shards or left <= shards - at - 1
        if parts[at] and full and at < shards - 1:
            at += 1
        parts[at][name] = tensor
        done, left = done + tensor.nbytes, left - 1
    return parts


def _write(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    # views of one storage are copied apart: the format refuses shared memory
    separate = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    with replacing(path) as partial:
        save_file(separate, partial, metadata={"format": "pt", **metadata})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2), encoding="utf-8")
