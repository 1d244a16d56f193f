"""What a curve file's few AdaLN features stand for, found out from the time embedder that it was made from."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from ..checkpoint.component import Component, open_component
from ..errors import CheckpointError
from . import keys
from .projection import Projection

LARGEST_RESIDUAL = 1e-2
"""Of the time features, relative: a basis that leaves more is not that of this time embedder."""

_PARTS = tuple(f"time_embedder.{layer}.{leaf}" for layer in ("proj_in", "proj_out") for leaf in ("weight", "bias"))
_FOLDERS = ("transformer", "transformer_ref")


def fit_basis(table: torch.Tensor, source: str | Path) -> Projection:
    """V with silu(time embedding at t) = V table[t] (+ a mean), by least squares over the grid of the table.

    Args:
        table: [G, k], the curve file's `adaln_t_table`.
        source: a file or folder with the time embedder's four tensors, in either naming.

    Raises:
        CheckpointError: no time embedder there, or one that the table was not made from.
    """
    wide = time_features(_read(open_component(source, _FOLDERS)), table.shape[0])
    table = table.double()
    for centred in (False, True):
        columns = torch.cat([table, torch.ones(table.shape[0], 1, dtype=torch.float64)], 1) if centred else table
        basis = torch.linalg.lstsq(columns, wide, driver="gelsd").solution
        residual = float((columns @ basis - wide).norm() / wide.norm())
        if residual <= LARGEST_RESIDUAL:
            rows = basis[: table.shape[1]].float()
            return Projection(wide.shape[1], table.shape[1], rows, basis[-1].float() if centred else None)
    raise CheckpointError(
        f"{source}: its time embedder is not the one that this curve file was made from (the file's features leave "
        f"{residual:.1%} of it, at most {LARGEST_RESIDUAL:.0%} is rounding). Name the full file of the same release."
    )


def time_features(weights: dict[str, torch.Tensor], points: int) -> torch.Tensor:
    """silu(time embedding) at `points` even times from 0 to 1, [points, wide] fp64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    times = torch.linspace(0, 1, points, dtype=torch.float64)
    half = w[_PARTS[0]].shape[1] // 2
    angles = times[:, None] * torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float64) / half)
    features = torch.cat([angles.cos(), angles.sin()], dim=-1)
    hidden = F.silu(F.linear(features, w[_PARTS[0]], w[_PARTS[1]]))
    return F.silu(F.linear(hidden, w[_PARTS[2]], w[_PARTS[3]]))


def _read(component: Component) -> dict[str, torch.Tensor]:
    found = {}
    for name in component.tensors:
        layer, _, leaf = name.rpartition(".")
        target = keys.locate(layer) if leaf in ("weight", "bias") else None
        if target and f"{target.canonical}.{leaf}" in _PARTS:
            found[f"{target.canonical}.{leaf}"] = name
    if missing := [part for part in _PARTS if part not in found]:
        raise CheckpointError(f"{component.label} has no {', '.join(missing)}. Name a file with full AdaLN.")
    return {part: component.read(name, dtype=torch.float32) for part, name in found.items()}
