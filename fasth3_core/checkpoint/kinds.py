"""The words that the planner and the name tables share: entries, sources, kinds of component, and finished plans."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .files import Stored
from .quant import Spec
from .reading import Reader
from .rows import Group
from .shapes import Shapes, Template

LEAVES = ("weight", "bias")
"""Parts of a layer whose rows go together."""

COMPANIONS = ("weight_scale", "weight_g")
"""Parts that are read together with the weight: the scale of a quantised one, the magnitude of weight norm."""

DROPPED = ("comfy_quant", "input_scale")
"""Parts of a quantised layer that are no part of its weight: the marker, which is read first, and the activations'."""


class Entry(Protocol):
    """A canonical tensor before it is loaded."""

    dtype: str
    shape: tuple[int, ...]

    def nbytes(self, dtype: torch.dtype | None) -> int: ...

    def load(self, reader: Reader, dtype: torch.dtype | None = None): ...


class Source(Protocol):
    """A component, or tensors in memory under the names of a file."""

    label: str
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None

    def open(self, device: torch.device | str = "cpu"): ...


@dataclass(frozen=True)
class Kind:
    """What the engine has to know about one kind of component."""

    name: str
    title: str
    canonical_of: Callable[[str, str], str | None]
    """(stored layer, layout) -> one of its canonical layers, or None if there is no such layer."""
    group: Callable[[str, str], Group]
    """(canonical layer, layout) -> the group it is in."""
    templates: Callable[[Shapes], tuple[Template, Template]]
    """Canonical names that are there, with () for what is incomplete -> (required, optional) shapes."""
    head_dim: Callable[[str, Mapping[str, Entry], Mapping[str, Any]], int]
    """(canonical layer, canonical entries so far, configuration) -> width of a head, for the rule "heads"."""
    aliases: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Other spellings of stored names, replaced before anything else."""
    ignored: frozenset[str] = frozenset()
    """Names that files carry and nothing reads."""


@dataclass(frozen=True)
class Plan:
    """Canonical tensors of one component."""

    kind: str
    layout: str
    prefix: str
    entries: Mapping[str, Entry]
    shapes: Mapping[str, tuple[int, ...]]
    quantised: Mapping[str, Spec]
    """Canonical layer -> how it is quantised."""
    ignored: tuple[str, ...]
    """Stored names that nothing reads."""

    def load(self, source: Source) -> dict[str, Any]:
        """Every canonical tensor of the source that the plan was made from, on the CPU, as it is stored."""
        with source.open() as reader:
            return {name: entry.load(reader) for name, entry in self.entries.items()}


def split(name: str) -> tuple[str, str]:
    """(layer, part): a name that ends in no known part is a layer of its own."""
    layer, _, leaf = name.rpartition(".")
    return (layer, leaf) if leaf in (*LEAVES, *COMPANIONS, *DROPPED) else (name, "")


def join(layer: str, leaf: str) -> str:
    return f"{layer}.{leaf}" if leaf else layer
