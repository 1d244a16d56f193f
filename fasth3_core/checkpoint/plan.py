"""From the headers of a component to its canonical tensors, each described but not yet loaded.

The engine is the same for the transformer and both VAEs; a `Kind` holds what differs. Everything that is wrong with the
names and shapes of a file is collected and raised once, before any allocation.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from . import shapes as shape_rules
from .dtypes import NAMES, TORCH
from .files import Stored
from .problems import grouped, report
from .quant import QuantAssembly, Spec, find_specs, is_scalar
from .reading import Reader
from .rows import Assembly, Group, NormAssembly, Piece, canonical_order, cut

_LEAVES = ("weight", "bias")
"""Parts of a layer whose rows go together."""

_COMPANIONS = ("weight_scale", "weight_g")
"""Parts that are read together with the weight: the scale of a quantised one, the magnitude of weight norm."""

_DROPPED = ("comfy_quant", "input_scale")
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
    templates: Callable[[shape_rules.Shapes], tuple[shape_rules.Template, shape_rules.Template]]
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


def make_plan(source: Source, kind: Kind, layout: str, prefix: str) -> Plan:
    """Describe every canonical tensor of `source`.

    Args:
        prefix: what the names of the component begin with in the file.

    Raises:
        CheckpointError: one error that lists all missing, unknown, duplicate and wrongly shaped tensors; or a form of
            quantisation that is not read.
    """
    found = _Found(source, kind, layout, prefix)
    found.assemble()
    found.compare()
    if lines := found.problems():
        mend = "The file is damaged, incomplete or of another model: compare its size with the release's."
        raise report(source.label, f"{kind.title} ({layout} names)", lines, mend)
    shapes = {name: entry.shape for name, entry in found.entries.items()}
    return Plan(kind.name, layout, prefix, found.entries, shapes, found.quantised, tuple(found.ignored))


class _Found:
    """What the headers give, and everything that is wrong with it. Lives for the length of one `make_plan`.

    "Local" names are those of the file without the prefix and with other spellings replaced.
    """

    def __init__(self, source: Source, kind: Kind, layout: str, prefix: str) -> None:
        self.kind, self.layout, self.prefix = kind, layout, prefix
        self.config = source.config or {}
        self.stored: dict[str, str] = {}
        """Local name -> name in the file."""
        self.unknown: list[str] = []
        self.duplicates: list[str] = []
        self.missing: dict[str, None] = {}
        self.wrong: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        self.quantised: dict[str, Spec] = {}
        self._name_locally(source)
        self.tensors = {local: source.tensors[name] for local, name in self.stored.items()}
        with source.open() as reader:
            self.specs = find_specs(
                source.label, self.tensors, source.metadata, source.config,
                lambda local: _bytes(reader, self.stored[local], self.tensors[local]), prefix,
            )  # fmt: skip
        self.ignored = [self.stored[n] for n in self.tensors if n in kind.ignored or split(n)[1] == "input_scale"]
        self.groups = self._group()

    def _name_locally(self, source: Source) -> None:
        for name in source.tensors:
            if not name.startswith(self.prefix):
                self.unknown.append(name)
                continue
            local = name[len(self.prefix) :]
            for pattern, replacement in self.kind.aliases:
                local = pattern.sub(replacement, local)
            if local in self.stored:
                self.duplicates += [self.stored[local], name]
            self.stored[local] = name

    def _group(self) -> dict[Group, set[str]]:
        """Groups of which at least one tensor is there -> parts that are there."""
        groups: dict[Group, set[str]] = {}
        for local, name in self.stored.items():
            layer, leaf = split(local)
            if local in self.kind.ignored or leaf in _DROPPED:
                continue
            canonical = self.kind.canonical_of(layer, self.layout)
            if canonical is None:
                self.unknown.append(name)
            else:
                groups.setdefault(self.kind.group(canonical, self.layout), set()).add(leaf)
        return groups

    def assemble(self) -> None:
        """Fill `entries` from every group that is complete."""
        # heads last: how wide they are is read from other tensors
        for group in sorted(self.groups, key=lambda group: group.rule == "heads"):
            for leaf in self.groups[group].difference(_COMPANIONS):
                sources = [join(layer, leaf) for layer in group.source]
                if not all(name in self.tensors for name in sources):
                    continue
                try:
                    self.entries |= self._assemble(group, leaf, sources)
                except ValueError as error:
                    for name in sources:
                        self.wrong[name] = f"is {self.tensors[name].dtype} {list(self.tensors[name].shape)}: {error}"

    def _assemble(self, group: Group, leaf: str, sources: list[str]) -> dict[str, Entry]:
        parts = [self.tensors[name] for name in sources]
        if len({part.shape for part in parts}) > 1:
            return {}  # the odd one is found by comparing with the other blocks
        if unread := {part.dtype for part in parts} - set(TORCH):
            raise ValueError(f"values of type {unread.pop()} are not read")
        first = parts[0].shape[0] if parts[0].shape else 1
        rows = first * len(sources)
        head_dim = 0
        if group.rule == "heads":
            head_dim = self.kind.head_dim(group.canonical[0], self.entries, self.config)
            if not head_dim:  # its source is missing, which is said already
                return {}
        order = canonical_order(group.rule, rows, head_dim)
        pieces = cut(order, sources, [join(layer, leaf) for layer in group.canonical], rows)
        shape = (rows // len(group.canonical), *parts[0].shape[1:]) if parts[0].shape else ()
        dtype = parts[0].dtype
        for part in parts:
            dtype = NAMES[torch.promote_types(TORCH[dtype], TORCH[part.dtype])] if part.dtype != dtype else dtype
        # pieces name what the file names, so that a reader needs no table
        made = {
            name: Assembly(dtype, shape, tuple(Piece(self.stored[p.source], p.start, p.count) for p in found))
            for name, found in pieces.items()
        }
        if leaf != "weight":
            return made
        specs = {self.specs.get(layer) for layer in group.source}
        if len(specs) > 1:
            raise ValueError("q, k and v are not quantised alike")
        if spec := specs.pop():
            self.quantised |= dict.fromkeys(group.canonical, spec)
            scales = {}
            for name, layer in zip(sources, group.source, strict=True):
                scale = join(layer, "weight_scale")
                scales[self.stored[name]] = (self.stored[scale], is_scalar(self.tensors[scale]))
            return {name: QuantAssembly(assembly, scales, spec) for name, assembly in made.items()}
        if "weight_g" in self.groups[group]:
            magnitude = join(group.source[0], "weight_g")
            if self.tensors[magnitude].shape != (first, *[1] * (len(shape) - 1)):
                raise ValueError(f"its magnitude is {list(self.tensors[magnitude].shape)}")
            return {name: NormAssembly(assembly, self.stored[magnitude]) for name, assembly in made.items()}
        return made

    def compare(self) -> None:
        """Fill `missing`, `wrong` and `unknown` from the templates."""
        present = {join(c, leaf) for group, leaves in self.groups.items() for c in group.canonical for leaf in leaves}
        shapes = {name: entry.shape for name, entry in self.entries.items()}
        required, optional = self.kind.templates({**dict.fromkeys(present, ()), **shapes})
        known = {**required, **optional}
        dims = shape_rules.dimensions(known, shapes)
        for name, want in shape_rules.expected(known, dims).items():
            layer, leaf = split(name)
            group = self.kind.group(layer, self.layout)
            for stored_layer in group.source:
                local = join(stored_layer, leaf)
                if local not in self.tensors:
                    if name in required:
                        self.missing[local] = None
                elif want is not None:
                    share = (want[0] * len(group.canonical) // len(group.source), *want[1:])
                    if self.tensors[local].shape != share:
                        self.wrong.setdefault(local, f"is {list(self.tensors[local].shape)}, expected {list(share)}")
        for name in set(required) - set(self.entries):
            layer, leaf = split(name)
            sources = [join(stored, leaf) for stored in self.kind.group(layer, self.layout).source]
            if not any(local in self.missing or local in self.wrong for local in sources):
                self.wrong[sources[0]] = "does not fit the tensors that it is read with"
        for local, name in self.stored.items():
            layer, leaf = split(local)
            if name.endswith(WEIGHT_NORM_DIRECTIONS) and join(layer, "weight_g") not in self.stored:
                self.missing[join(layer, "weight_g")] = None
        for name in present - set(known):
            layer, leaf = split(name)
            if leaf not in _COMPANIONS:
                sources = (join(s, leaf) for s in self.kind.group(layer, self.layout).source)
                self.unknown += [self.stored[s] for s in sources if s in self.stored]

    def problems(self) -> list[str]:
        wrong = [f"{self.stored[local]} {text}" for local, text in self.wrong.items()]
        return [
            *grouped([self.prefix + local for local in self.missing], "missing"),
            *grouped(dict.fromkeys(self.unknown), "unknown"),
            *grouped(dict.fromkeys(self.duplicates), "duplicate"),
            *islice(wrong, 12),
            *([f"and {len(wrong) - 12} more of the wrong shape"] if len(wrong) > 12 else []),
        ]


WEIGHT_NORM_DIRECTIONS = (".weight_v", ".parametrizations.weight.original1")
"""Ends of names that hold a weight only together with its magnitude."""


def split(name: str) -> tuple[str, str]:
    """(layer, part): a name that ends in no known part is a layer of its own."""
    layer, _, leaf = name.rpartition(".")
    return (layer, leaf) if leaf in (*_LEAVES, *_COMPANIONS, *_DROPPED) else (name, "")


def join(layer: str, leaf: str) -> str:
    return f"{layer}.{leaf}" if leaf else layer


def _bytes(reader: Reader, name: str, stored: Stored) -> bytes:
    out = torch.empty(stored.shape, dtype=torch.uint8)
    reader.rows(name, 0, out)
    return bytes(out.numpy())
