"""Recorded truth: safetensors with JSON metadata, and the rows that a comparison with it prints."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import CheckpointError


class Golden:
    """One recorded file. Tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, "pt")
        except Exception as error:  # the library raises types of its own for each kind of damage
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        self.meta = _Metadata(path, self._file.metadata() or {})
        self.names = set(self._file.keys())

    @property
    def kind(self) -> str:
        return self.meta.get("kind", self.path.stem)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.names:
            raise CheckpointError(f"{self.path} lacks the tensor {name!r}: it was recorded incompletely.")
        return self._file.get_tensor(name)

    def optional(self, name: str) -> torch.Tensor | None:
        return self.tensor(name) if name in self.names else None

    def other(self) -> "Golden":
        """The file of the same folder that holds this one's weights; itself if it does."""
        if "weights" not in self.meta:
            return self
        return Golden(self.path.parent / f"{self.meta['weights']}.safetensors")

    def weights(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("weights."): self.tensor(name) for name in self.names if name.startswith("weights.")}

    def cases(self, pattern: str) -> Iterator[int]:
        """i = 0, 1, … while the tensor `pattern.format(i)` is there."""
        i = 0
        while pattern.format(i) in self.names:
            yield i
            i += 1


class _Metadata(dict[str, Any]):
    """Header metadata; its values are JSON."""

    def __init__(self, path: Path, texts: Mapping[str, str]) -> None:
        self._path = path
        for key, text in texts.items():
            try:
                self[key] = json.loads(text)
            except ValueError:
                self[key] = text  # as other writers put it, such as {"format": "pt"}

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self._path} lacks the metadata {key!r}: it was recorded incompletely.")


@dataclass(frozen=True)
class Row:
    """One comparison."""

    file: str
    case: str
    backend: str
    dtype: str
    metric: str
    error: float | None
    """None when nothing ran."""
    tolerance: float
    note: str = ""
    """Why nothing ran, or could be compared."""

    @property
    def status(self) -> str:
        if self.error is None:
            return "n/a"
        return "ok" if self.error <= self.tolerance else "FAIL"  # NaN fails


_TINY = 1e-300
"""Smallest divisor: no error is no error where the truth is all zero, too."""


def max_abs(out: torch.Tensor, ref: torch.Tensor) -> float:
    return (out.double().cpu() - ref.double()).abs().max().item()


def of_max(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest error over the largest value."""
    return max_abs(out, ref) / max(ref.double().abs().max().item(), _TINY)


def rel_l2(out: torch.Tensor, ref: torch.Tensor) -> float:
    return (out.double().cpu() - ref.double()).norm().item() / max(ref.double().norm().item(), _TINY)


def mismatches(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Number of entries that differ."""
    return float((out.cpu() != ref).sum())


METRICS = {"max abs": max_abs, "of max": of_max, "rel L2": rel_l2, "mismatches": mismatches}

GPU_FACTOR = 10.0
"""fp32 tolerances on a GPU, over those on the CPU: the same arithmetic in another order."""

LOW_PRECISION_FACTOR = 2.0
"""Allowed error in fp16 and bf16, over what plain torch in that dtype loses on the same case."""


@dataclass(frozen=True)
class Target:
    """Where and how the cases run."""

    device: torch.device
    dtype: torch.dtype
    backends: tuple[str, ...] = ()
    """Implementations of block_sparse_attention to run; empty means all."""

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def row(
        self,
        golden: Golden,
        case: str,
        metric: str,
        out: torch.Tensor,
        ref: torch.Tensor,
        tolerance: float,
        *,
        backend: str = "torch",
        plain: torch.Tensor | None = None,
        recorded: torch.Tensor | None = None,
    ) -> Row:
        """Compare with the truth.

        Args:
            tolerance: of fp32 on the CPU.
            plain: what plain torch gives in this dtype; its error makes the tolerance in place of `tolerance`.
            recorded: the same, recorded in the file.
        """
        if out.shape != ref.shape:
            note = f"{list(out.shape)} where {list(ref.shape)} was recorded"
            return Row(golden.path.name, case, backend, self.dtype_name, "shape", math.inf, 0.0, note)
        factor = GPU_FACTOR if self.device.type != "cpu" and metric != "mismatches" else 1.0
        bound = tolerance * factor
        if (anchor := recorded if recorded is not None else plain) is not None:
            metric = "rel L2"
            bound = LOW_PRECISION_FACTOR * rel_l2(anchor, ref)
        return Row(golden.path.name, case, backend, self.dtype_name, metric, METRICS[metric](out, ref), bound)

    def unavailable(self, golden: Golden, case: str, backend: str, why: str) -> Row:
        return Row(golden.path.name, case, backend, self.dtype_name, "", None, 0.0, why)
