"""A safetensors file written tensor by tensor: the header first, then values as they are made.

The format's library writes from tensors that are all in memory; a transformer is 66 GB.
"""

import json
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ..atomic import replacing
from ..errors import ConfigError
from .dtypes import NAMES
from .files import Stored

_ALIGN = 8
_PIECE = 32 << 20


def write_stream(
    path: Path,
    layout: Mapping[str, Stored],
    values: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `path`; nothing of that name is there until all of it is.

    Args:
        layout: every tensor with its dtype and shape, in the order in which `values` gives them.

    Raises:
        ConfigError: the disk has no room for it.
        ValueError: a value is not what the layout says.
    """
    header, size = file_header(layout, metadata or {})
    free = shutil.disk_usage(path.parent).free
    if free < len(header) + size:
        raise ConfigError(
            "output", str(path), f"a disk with {(len(header) + size) / 1e9:.1f} GB free; this one has {free / 1e9:.1f}",
            "Write to another disk.",
        )  # fmt: skip
    with replacing(path) as partial, open(partial, "wb") as file:
        file.write(header)
        expected = iter(layout.items())
        for name, tensor in values:
            wanted, stored = next(expected)
            if (name, NAMES[tensor.dtype], tuple(tensor.shape)) != (wanted, stored.dtype, stored.shape):
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; next is {wanted} {stored}")
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            for start in range(0, raw.numel(), _PIECE):
                file.write(memoryview(raw[start : start + _PIECE].cpu().numpy()))
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"no value for {missing[0]}")


def file_header(layout: Mapping[str, Stored], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """(length and header as they begin a file, bytes of the values)."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, stored in layout.items():
        entries[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [at, at + stored.nbytes]}
        at += stored.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text, at
