"""What a curve file's few AdaLN features stand for, found out from the time embedder that it was made from.

A curve file has no time embedder, only a table of the features that it gave, in a basis that is not in the file. With
the embedder at hand the basis follows by least squares; then AdaLN changes of full width can be projected, and changes
of the embedder itself become another table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..checkpoint.component import Component, open_component
from ..checkpoint.kinds import Entry
from ..checkpoint.reading import Reader
from ..checkpoint.rows import Assembly, Piece
from ..errors import CheckpointError
from . import keys
from .projection import Projection

LARGEST_RESIDUAL = 1e-2
"""Of the time features, relative: a basis that leaves more is not that of this time embedder."""

LARGEST_OVERLAP = 0.1
"""Cosine between two basis vectors. Those of a singular value decomposition are orthogonal; fitted to another embedder,
whose features are as smooth in time and so leave as little, they are far from it."""

_SEEN = 1e-5
"""Share of the features, relative to the largest, below which rounding of an fp32 table hides a direction."""

TABLE = "adaln_t_table"
PREFIX = "time_embedder."
_PARTS = tuple(f"{PREFIX}{layer}.{leaf}" for layer in ("proj_in", "proj_out") for leaf in ("weight", "bias"))
_FOLDERS = ("transformer", "transformer_ref")


@dataclass(frozen=True, slots=True)
class RetimedTable:
    """The table of a curve file for a changed time embedder: its features, in the file's basis, when it is loaded."""

    base: Entry
    projection: Projection
    embedder: Mapping[str, Entry]
    """The four tensors of the time embedder, as they are now."""

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def nbytes(self, dtype: torch.dtype | None) -> int:
        return self.base.nbytes(dtype or torch.float32)

    def load(self, reader: Reader, dtype: torch.dtype | None = None) -> torch.Tensor:
        with reader.as_one(self.nbytes(dtype)):
            table, _ = self.fitted(reader)
            return table.to(reader.device, dtype or torch.float32)

    def fitted(self, reader: Reader) -> tuple[torch.Tensor, float]:
        """(table fp64 on the CPU, what of the features lies outside the basis, relative)."""
        weights = {name: entry.load(reader, torch.float32).cpu() for name, entry in self.embedder.items()}
        wide = time_features(weights, self.shape[0])
        basis = self.projection.basis.double()
        mean = 0.0 if self.projection.mean is None else self.projection.mean.double()
        table = (wide - mean) @ torch.linalg.pinv(basis)
        return table, float((table @ basis + mean - wide).norm() / wide.norm())


def open_embedder(source: str | Path) -> tuple[Component, dict[str, str]]:
    """The component with a time embedder, and canonical name -> name in it of the embedder's four tensors.

    Raises:
        CheckpointError: there is none.
    """
    component = open_component(source, _FOLDERS)
    found = {}
    for name in component.tensors:
        layer, _, leaf = name.rpartition(".")
        target = keys.locate(layer) if leaf in ("weight", "bias") else None
        if target and f"{target.canonical}.{leaf}" in _PARTS:
            found[f"{target.canonical}.{leaf}"] = name
    if missing := [part for part in _PARTS if part not in found]:
        raise CheckpointError(f"{component.label} has no {', '.join(missing)}. Name a file with full AdaLN.")
    return component, found


def as_entries(component: Component, found: Mapping[str, str], prefix: str) -> dict[str, Entry]:
    """The embedder's tensors under canonical names, where the component is joined to another under `prefix`."""
    entries: dict[str, Entry] = {}
    for part, name in found.items():
        stored = component.tensors[name]
        entries[part] = Assembly(stored.dtype, stored.shape, (Piece(prefix + name, 0, stored.shape[0]),))
    return entries


def fit_basis(table: torch.Tensor, embedder: Mapping[str, torch.Tensor], label: str) -> Projection:
    """V with silu(time embedding at t) = V table[t] (+ a mean), by least squares over the grid of the table.

    Args:
        table: [G, k], the curve file's.
        embedder: the four tensors under canonical names.

    Raises:
        CheckpointError: the table was not made from this embedder.
    """
    wide = time_features(embedder, table.shape[0])
    table = table.double()
    for centred in (False, True):
        columns = torch.cat([table, torch.ones(table.shape[0], 1, dtype=torch.float64)], 1) if centred else table
        basis = torch.linalg.lstsq(columns, wide, driver="gelsd").solution
        residual = float((columns @ basis - wide).norm() / wide.norm())
        rows = basis[: table.shape[1]]
        share = table.norm(dim=0) * rows.norm(dim=1)
        unit = F.normalize(rows[share > _SEEN * share.max()], dim=1)
        overlap = float((unit @ unit.T - torch.eye(len(unit), dtype=torch.float64)).abs().max())
        if residual <= LARGEST_RESIDUAL and overlap <= LARGEST_OVERLAP:
            mean = basis[-1].float() if centred else None
            return Projection(wide.shape[1], table.shape[1], rows.float(), mean)
    raise CheckpointError(
        f"{label}: its time embedder is not the one that this curve file was made from (the file's features leave "
        f"{residual:.1%} of it, at most {LARGEST_RESIDUAL:.0%} is rounding; their directions overlap by {overlap:.2f}, "
        f"at most {LARGEST_OVERLAP} is). Name the full file of the same release."
    )


def time_features(weights: Mapping[str, torch.Tensor], points: int) -> torch.Tensor:
    """silu(time embedding) at `points` even times from 0 to 1, [points, wide] fp64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    times = torch.linspace(0, 1, points, dtype=torch.float64, device="cpu")
    half = w[_PARTS[0]].shape[1] // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float64, device="cpu") / half)
    angles = times[:, None] * frequencies
    features = torch.cat([angles.cos(), angles.sin()], dim=-1)
    hidden = F.silu(F.linear(features, w[_PARTS[0]], w[_PARTS[1]]))
    return F.silu(F.linear(hidden, w[_PARTS[2]], w[_PARTS[3]]))
