"""A component of a model: one file, or a folder of shards with their index, with the configuration beside it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .files import Stored, WeightFile, check_regular, read_header
from .reading import FileReader

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True)
class Component:
    """Headers only. Values are read through `open`, which holds file handles no longer than its `with` block."""

    root: Path
    """The file, or the folder of the shards."""
    files: tuple[WeightFile, ...]
    config: Mapping[str, Any] | None
    """`config.json` beside the weights."""

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        return {name: stored for file in self.files for name, stored in file.tensors.items()}

    @cached_property
    def metadata(self) -> dict[str, str]:
        return {key: value for file in self.files for key, value in file.metadata.items()}

    @property
    def label(self) -> str:
        return str(self.root)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        """Path, size and modification time of every file: the same for the same weights."""
        return tuple((str(file.path.resolve()), file.size, file.mtime_ns) for file in self.files)

    @property
    def folder(self) -> Path:
        return self.root if self.root.is_dir() else self.root.parent

    def open(self, device: torch.device | str = "cpu", on_piece: Callable[[int], None] = lambda n: None) -> FileReader:
        """A reader that fills tensors on `device`; `on_piece` is called with the bytes of each piece it has filled."""
        return FileReader({file.path: file for file in self.files}, self.tensors, torch.device(device), on_piece)

    def read(self, name: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
        """One stored tensor, in its own dtype or in `dtype`."""
        with self.open(device) as reader:
            return reader.read(name, dtype)


def open_component(path: str | Path, folders: tuple[str, ...] = ()) -> Component:
    """Open the weights at `path`: a file, an index, a folder with either, or a folder that holds one of `folders`.

    Args:
        folders: names of component folders to look for when `path` is the root of a repository.

    Raises:
        CheckpointError: nothing there, several to choose from, a shard missing, or files that are not what they claim.
    """
    path = Path(path)
    if path.is_file():
        return _open_index(path) if path.name.endswith(".json") else _open_file(path)
    if not path.is_dir():
        check_regular(path)
        raise CheckpointError(f"{path} does not exist.")
    indices = sorted(path.glob("*" + INDEX_SUFFIX))
    weights = sorted(path.glob("*" + SUFFIX))
    if len(indices) == 1:
        return _open_index(indices[0])
    if not indices and len(weights) == 1:
        return Component(path, (read_header(weights[0]),), _config(path))
    if indices or weights:
        names = ", ".join(file.name for file in indices or weights)
        want = "one index" if indices else f"one weight file, or an index (*{INDEX_SUFFIX}) that joins them"
        raise CheckpointError(f"{path} holds {names}; expected {want}. Name the one to load.")
    found = [path / name for name in folders if (path / name).is_dir()]
    if len(found) == 1:
        return open_component(found[0])
    if found:
        choices = " or ".join(str(folder) for folder in found)
        raise CheckpointError(f"{path} holds several models. Name the one to load: {choices}.")
    partitions = [path / name for name in OFFICIAL_PARTITIONS if (path / name).is_dir()]
    if partitions:
        choices = " or ".join(str(partition) for partition in partitions)
        raise CheckpointError(f"{path} is the root of the official release. Name the partition to load: {choices}.")
    present = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
    listing = ", ".join(present[:8]) + (", ..." if len(present) > 8 else "") or "nothing"
    raise CheckpointError(f"{path} has no safetensors weights; it holds {listing}.")


OFFICIAL_PARTITIONS = ("FL2VA", "Ref2VA")
"""Folders of the official release, whose transformers fuse q, k and v head by head."""


def in_official_tree(component: Component) -> bool:
    """Whether the weights lie in `FL2VA/transformer` or `Ref2VA/transformer`, or in a partition by its own word.

    The official transformer has the tensor names of the single-file layout, so its place is all that tells them apart.
    """
    if component.folder.name != "transformer":
        return False
    partition = component.folder.resolve().parent
    if partition.name in OFFICIAL_PARTITIONS:
        return True
    index = partition / "model_index.json"
    return index.is_file() and any(name in index.read_text(encoding="utf-8") for name in OFFICIAL_PARTITIONS)


_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")


def _refuse_shard(path: Path) -> None:
    """A part of a sharded model is no model: raise with the name of what to load in its place."""
    for index in sorted(path.parent.glob("*" + INDEX_SUFFIX)):
        try:
            shards = set(read_json(index)["weight_map"].values())
        except (CheckpointError, KeyError, AttributeError, TypeError):
            continue  # a damaged index of others says nothing of this file
        if path.name in shards and len(shards) > 1:
            raise CheckpointError(
                f"{path} is one of the {len(shards)} shards of a model. Name their folder, {path.parent}, or their "
                f"index, {index.name}."
            )
    if (match := _SHARD.search(path.name)) and int(match[1]) > 1:
        raise CheckpointError(
            f"{path} is one of {int(match[1])} shards of a model by its name, and their index (*{INDEX_SUFFIX}) is "
            "not beside it. Download the index and all shards into one folder, and name the folder."
        )


def _open_file(path: Path) -> Component:
    _refuse_shard(path)
    file = read_header(path)
    # a configuration belongs to the file only where the file is alone: model folders hold many models
    alone = list(path.parent.glob("*" + SUFFIX)) == [path]
    return Component(path, (file,), _config(path.parent) if alone else None)


def _open_index(path: Path) -> Component:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map from tensors to files: it is not an index of weights.")
    shards = sorted(set(weight_map.values()))
    if outside := [name for name in shards if Path(name).name != name]:
        raise CheckpointError(f"{path} points outside its folder: {outside[0]!r}.")
    if missing := [name for name in shards if not (path.parent / name).is_file()]:
        raise CheckpointError(
            f"{path.parent}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}. "
            "Download them into this folder."
        )
    files = tuple(read_header(path.parent / name) for name in shards)
    _check_index(path, weight_map, files)
    return Component(path.parent, files, _config(path.parent))


def _check_index(path: Path, weight_map: Mapping[str, str], files: tuple[WeightFile, ...]) -> None:
    counts = Counter(name for file in files for name in file.tensors)
    present = {(name, file.path.name) for file in files for name in file.tensors}
    absent = [name for name, shard in weight_map.items() if (name, shard) not in present]
    problems = (
        ("in more than one shard", [name for name, count in counts.items() if count > 1]),
        ("in the index but not in its shard", absent),
        ("in a shard but not in the index", [name for name in counts if name not in weight_map]),
    )
    said = [f"{len(names)} {what} (e.g. {names[0]!r})" for what, names in problems if names]
    if said:
        raise CheckpointError(f"{path} and its shards disagree: tensors {'; '.join(said)}. Download the folder again.")


def _config(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "config.json"
    return read_json(path) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a CheckpointError that names the file."""
    check_regular(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object.")
    return value
