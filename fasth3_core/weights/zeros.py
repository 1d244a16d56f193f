"""Whether a stored weight is all zero, from as little of it as it takes."""

import torch

from ..adapters.entry import AdaptedEntry
from ..checkpoint.dtypes import TORCH
from ..checkpoint.kinds import Entry
from ..checkpoint.quant import QuantAssembly
from ..checkpoint.reading import FileReader

_PROBE_ROWS = 512
"""Rows that are looked at together: 5.5 MB in bf16 at the released width."""


def is_zero(reader: FileReader, entry: Entry) -> bool:
    """Stops at the first value that is not."""
    if isinstance(entry, AdaptedEntry):
        return entry.is_zero(reader)
    assembly = entry.data if isinstance(entry, QuantAssembly) else entry
    # as stored, which is read without a copy; float8 has no test for zero of its own
    dtype = torch.float32 if assembly.dtype.startswith("F8") else TORCH[assembly.dtype]
    for piece in assembly.pieces:
        for start in range(0, piece.count, _PROBE_ROWS):
            rows = torch.empty(min(_PROBE_ROWS, piece.count - start), *assembly.shape[1:], dtype=dtype, device="cpu")
            reader.rows(piece.source, piece.start + start, rows)
            if rows.any():
                return False
    return True
