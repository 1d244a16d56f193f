"""Safetensors headers: what is in a file, checked against its size before anything is allocated.

A file is 8 bytes of header length (little endian), the header as JSON, then the values. Written here rather than
taken from a library because a file that is not what it should be deserves its own words.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .dtypes import BITS

MAX_HEADER = 100_000_000
"""Bytes. The format's own limit; a longer one is not a header."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a file describes it."""

    dtype: str
    """Name of the format: "BF16", "F8_E4M3", ..."""
    shape: tuple[int, ...]
    path: Path | None = None
    """None for a tensor in memory."""
    offset: int = 0
    """Of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The header of one file."""

    path: Path
    size: int
    mtime_ns: int
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]


def read_header(path: Path) -> WeightFile:
    """Read and check the header of a safetensors file; no tensor value is read.

    Raises:
        CheckpointError: not a safetensors file, truncated, or damaged; says which, with the sizes.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            return _read_header(path, file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error


def check_regular(path: Path) -> None:
    """Raises CheckpointError for what would never end, or never begin, to be read: a pipe, a socket, a device."""
    if path.exists() and not path.is_file():
        what = "folder" if path.is_dir() else "pipe, socket or device"
        raise CheckpointError(f"{path} is a {what}, not a file. Name the file itself.")


def _read_header(path: Path, file) -> WeightFile:
    stat = os.fstat(file.fileno())
    start = file.read(512)
    if foreign := describe_foreign(start):
        raise CheckpointError(f"{path} is {foreign}")
    length = struct.unpack("<Q", start[:8])[0]
    if length > MAX_HEADER or (len(start) > 8 and start[8:9] != b"{"):
        raise CheckpointError(f"{path} is not a safetensors file: it does not begin with the format's header.")
    if 8 + length > stat.st_size:
        raise _truncated(path, 8 + length, stat.st_size, "for its header alone")
    file.seek(8)
    header = _parse(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: the header's __metadata__ is no table of texts. Download the file again.")
    data = stat.st_size - 8 - length
    tensors = {}
    end = 0
    for name, (dtype, shape, begin, stop) in sorted(
        ((name, _entry(path, name, entry)) for name, entry in header.items()), key=lambda item: item[1][2:]
    ):
        tensors[name] = Stored(dtype, shape, path, 8 + length + begin)
        if begin != end or stop - begin != tensors[name].nbytes:
            raise CheckpointError(
                f"{path}: the header is damaged: {name!r} ({dtype} {list(shape)}) lies at bytes {begin} to {stop}, "
                f"expected {end} to {end + tensors[name].nbytes}. Download the file again."
            )
        end = stop
    if end > data:
        raise _truncated(path, 8 + length + end, stat.st_size, f"for its {len(tensors)} tensors")
    if end < data:
        raise CheckpointError(
            f"{path} has {stat.st_size} bytes, {data - end} more than its header describes. Download the file again."
        )
    return WeightFile(path, stat.st_size, stat.st_mtime_ns, tensors, metadata)


def _truncated(path: Path, expected: int, size: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated: it has {size} bytes and needs {expected} {what} ({expected - size} are missing). "
        "Download the file again."
    )


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{path}: the header lists {key!r} twice. Download the file again.")
            found[key] = value
        return found

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not readable ({error}). Download the file again.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, not a table of tensors.")
    return header


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, stop)
        if dtype in BITS and all(type(n) is int and n >= 0 for n in numbers):
            return dtype, shape, begin, stop
    except (KeyError, TypeError, ValueError):
        pass  # said below, in the same words as a wrong value
    raise CheckpointError(f"{path}: the header entry of {name!r} is {entry!r}, which describes no tensor.")


def describe_foreign(start: bytes) -> str | None:
    """What a file that begins with these bytes is, if it is a known kind that cannot be loaded; ends with the mend."""
    if not start:
        return "empty (0 bytes). Download the file again."
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the weights themselves. Run `git lfs pull`, or download the file itself."
    if start.lstrip()[:1] == b"<":
        return "a web page saved under the name of a model, usually an error or login page. Download the file again."
    if start.startswith(b"PK\x03\x04") or (start[0] == 0x80 and len(start) > 1 and 2 <= start[1] <= 5):
        return (
            "a PyTorch pickle (.pt, .ckpt, .bin), which can run code when loaded and is refused. "
            "Use the safetensors file of the same release."
        )
    if start.startswith(b"GGUF"):
        return (
            "a GGUF file, which this package does not read. "
            "Use the bf16, int8_convrot or fp8_scaled safetensors file of the same release; the command 'quantize' "
            "makes the latter two from the first."
        )
    if len(start) < 8:
        return f"too short ({len(start)} bytes) to be a safetensors file. Download the file again."
    return None
