"""Names in widgets to files on disk, never outside the folders they may come from."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..fasth3_core.errors import CheckpointError

_INDEX_SUFFIX = ".safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".sft")
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


def is_within(folder: Path, target: Path) -> bool:
    """Whether `target` lies in `folder` by its name; links inside the folder may lead wherever the user put them."""
    folder, target = os.path.abspath(folder), os.path.abspath(target)
    try:
        return os.path.commonpath([folder, target]) == folder
    except ValueError:  # different drives
        return False


def weight_names(roots: Iterable[Path]) -> list[str]:
    """What a loader offers: weight files, and folders that hold a sharded model, relative to their root.

    The shards of such a folder are not offered one by one.
    """
    names: set[str] = set()
    for root in roots:
        for where, _, files in os.walk(root, followlinks=True):
            here = Path(where).relative_to(root)
            sharded = any(name.endswith(_INDEX_SUFFIX) for name in files)
            if sharded and here.parts:
                names.add(here.as_posix())
            for name in files:
                if name.lower().endswith(_WEIGHT_SUFFIXES) and not (sharded and _SHARD.fullmatch(name)):
                    names.add((here / name).as_posix())
    return sorted(names)


def resolve(roots: Iterable[Path], name: str) -> Path:
    """The file or folder that a loader's widget names.

    Raises:
        CheckpointError: it leads outside every root, or is in none of them.
    """
    roots = list(roots)
    candidates = [root / name for root in roots if is_within(root, root / name)]
    if not name or not candidates:
        raise CheckpointError(f"{name!r} is not a name inside the model folders.")
    for path in candidates:
        if path.exists():
            return path
    raise CheckpointError(f"{name!r} is in none of {', '.join(str(root) for root in roots)}. Put it there and refresh.")


def fingerprint(path: Path) -> str:
    """Changes when the file, or a file of the folder, is replaced: ComfyUI then runs the loader again."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return ";".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files if f.is_file())
