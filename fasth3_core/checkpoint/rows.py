"""How layouts differ: the same rows, stored in another order and cut into other tensors.

A canonical tensor is described by the pieces of stored tensors that make it up, so that loading it is one copy of each
row into its place. Weights, biases and the scales of quantised weights are permuted by the same pieces.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .dtypes import TORCH
from .reading import Reader

RULES = ("same", "swap", "heads")


@dataclass(frozen=True, slots=True)
class Group:
    """Canonical layers and the stored layers that hold the same rows.

    The rows of `source`, one after another, are the rows of `canonical`, one after another, after `rule`:
    "same" order; "swap" of the two halves; "heads": stored head by head (q, k, v of each), canonical q, k, v in turn.
    """

    canonical: tuple[str, ...]
    source: tuple[str, ...]
    rule: str = "same"


@dataclass(frozen=True, slots=True)
class Piece:
    source: str
    start: int
    """First row of the stored tensor."""
    count: int


def canonical_order(rule: str, rows: int, head_dim: int = 0) -> list[tuple[int, int]]:
    """(first stored row, count) of the runs that make up canonical order.

    Raises:
        ValueError: `rows` cannot be divided as the rule demands.
    """
    if rule == "same":
        return [(0, rows)]
    if rule == "swap":
        if rows % 2:
            raise ValueError(f"{rows} rows have no two halves")
        return [(rows // 2, rows // 2), (0, rows // 2)]
    if rule != "heads":
        raise ValueError(f"row rule {rule!r}: one of {RULES}")
    if rows % (3 * head_dim):
        raise ValueError(f"{rows} rows are not q, k and v of heads that are {head_dim} wide")
    heads = rows // (3 * head_dim)
    return [((3 * head + part) * head_dim, head_dim) for part in range(3) for head in range(heads)]


def stored_order(order: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The inverse: (first canonical row, count) of the runs that make up stored order."""
    runs, at = [], 0
    for start, count in order:
        runs.append((start, at, count))
        at += count
    return [(at, count) for _, at, count in sorted(runs)]


def cut(
    order: Sequence[tuple[int, int]], inputs: Sequence[str], outputs: Sequence[str], rows: int
) -> dict[str, tuple[Piece, ...]]:
    """Divide `rows` ordered rows over equal inputs and equal outputs: the pieces of each output."""
    in_rows, out_rows = rows // len(inputs), rows // len(outputs)
    pieces: dict[str, list[Piece]] = {name: [] for name in outputs}
    at = 0
    for start, count in order:
        while count:
            take = min(count, in_rows - start % in_rows, out_rows - at % out_rows)
            pieces[outputs[at // out_rows]].append(Piece(inputs[start // in_rows], start % in_rows, take))
            start, at, count = start + take, at + take, count - take
    return {name: tuple(parts) for name, parts in pieces.items()}


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor that is made from pieces of stored ones when it is loaded."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def nbytes(self, dtype: torch.dtype | None) -> int:
        """Bytes once loaded in `dtype`, or in the stored dtype."""
        return math.prod(self.shape) * (dtype or TORCH[self.dtype]).itemsize

    def load(self, reader: Reader, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, on the reader's device, in `dtype` or as stored."""
        out = torch.empty(self.shape, dtype=dtype or TORCH[self.dtype], device=reader.device)
        rows = out.view(1) if out.ndim == 0 else out
        at = 0
        for piece in self.pieces:
            reader.rows(piece.source, piece.start, rows[at : at + piece.count])
            at += piece.count
        return out


@dataclass(frozen=True, slots=True)
class NormAssembly:
    """A weight that is stored as direction v and magnitude g (weight norm): v * (g / |v|), fp32, when it is loaded."""

    direction: Assembly
    magnitude: str

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.direction.shape

    def nbytes(self, dtype: torch.dtype | None) -> int:
        return self.direction.nbytes(dtype or torch.float32)

    def load(self, reader: Reader, dtype: torch.dtype | None = None) -> torch.Tensor:
        v = self.direction.load(reader, torch.float32)
        g = torch.empty(v.shape[0], *[1] * (v.ndim - 1), dtype=torch.float32, device=v.device)
        reader.rows(self.magnitude, 0, g)
        return (v * (g / row_norms(v))).to(dtype or torch.float32)


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """Norm of each slice along dim 0, [rows, 1, ...]."""
    return torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
