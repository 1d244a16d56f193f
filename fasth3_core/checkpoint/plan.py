"""From the headers of a component to its canonical tensors, each described but not yet loaded.

The engine is the same for the transformer and both VAEs; a `Kind` holds what differs. Everything that is wrong with the
names and shapes of a file is collected and raised once, before any allocation.
"""

from itertools import islice

import torch

from . import shapes as shape_rules
from .dtypes import NAMES, TORCH
from .files import Stored
from .kinds import COMPANIONS, DROPPED, Entry, Kind, Plan, Source, join, split
from .problems import grouped, report
from .quant import QuantAssembly, Spec, is_scalar
from .quant_markers import find_specs
from .reading import Reader
from .rows import Assembly, Group, NormAssembly, Piece, canonical_order, cut

_DIRECTIONS = (".weight_v", ".parametrizations.weight.original1")
"""Ends of names that hold a weight only together with its magnitude."""


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
            if local in self.kind.ignored or leaf in DROPPED:
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
            for leaf in self.groups[group].difference(COMPANIONS):
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
        quantised = leaf == "weight" and any(layer in self.specs for layer in group.source)
        readable = {name for name, dtype in TORCH.items() if quantised or dtype.is_floating_point}
        if unread := {part.dtype for part in parts} - readable:
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
            g = self.tensors[magnitude]
            if g.shape != (first, *[1] * (len(shape) - 1)) or g.dtype not in readable:
                raise ValueError(f"its magnitude is {g.dtype} {list(g.shape)}")
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
            if name.endswith(_DIRECTIONS) and join(layer, "weight_g") not in self.stored:
                self.missing[join(layer, "weight_g")] = None
            if leaf == "weight_scale" and layer not in self.specs:
                self.unknown.append(name)  # of a weight that is not quantised: who wrote it meant another weight
        for name in present - set(known):
            layer, leaf = split(name)
            if leaf not in COMPANIONS:
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


def _bytes(reader: Reader, name: str, stored: Stored) -> bytes:
    out = torch.empty(stored.shape, dtype=torch.uint8, device="cpu")
    reader.rows(name, 0, out)
    return bytes(out.numpy())
