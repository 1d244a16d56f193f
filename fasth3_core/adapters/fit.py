"""Where each tensor of an adapter goes in one model, decided from headers alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..checkpoint.dtypes import FLOATS
from ..checkpoint.kinds import Entry, Plan
from ..checkpoint.quant import Spec
from ..checkpoint.rows import Assembly, Piece, canonical_order, cut
from ..config import DiTConfig
from ..weights.fp8 import is_projection
from .edits import Added, Assigned, Edit, LowRank, Shifted
from .entry import adapted
from .file import Adapter, Module
from .keys import ALPHA, DIFF, DIFF_BIAS, DOWN, SET, UP
from .projection import Projection
from .report import BESIDE, CREATED, MERGED, UNMATCHED, Row

GATE = ".attn.to_gate_compress"
_ADALN = "adaln_proj.linear"
_PRODUCTS = re.compile(
    r"(token_refiner\.)?blocks\.\d+\.(attn\.(qkv_proj|out_proj|to_gate_compress)|mlp\.fc[12])|condition_proj"
)
"""Layers large enough to be worth keeping an adapter beside when nothing forces it."""
_BLOCK = re.compile(r"(token_refiner\.)?blocks\.(\d+)\.")


class Unmatched(Exception):
    """Why a tensor of an adapter fits nothing."""


@dataclass(frozen=True)
class Fit:
    entries: Mapping[str, Entry]
    """Canonical names that the adapter changes or creates -> how they are loaded now."""
    dequantised: frozenset[str]
    """Layers that were quantised and are float now, because a difference or an assignment was merged into them."""
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Fitter:
    """Fits one adapter to one model."""

    adapter: Adapter
    plan: Plan
    config: DiTConfig
    strength: float
    alpha: float
    """For files that state none; 0 takes their rank."""
    beside: bool
    """Keep low-rank products beside float weights too; beside quantised ones they always are."""
    fp8: bool
    """Whether the run quantises projections as they are read, whatever they were: then it is merged before that."""
    projection: Projection | None
    prefix: str
    """Before the adapter's names in the joined component."""

    def fit(self) -> Fit:
        edits: dict[str, list[Edit]] = {}
        rows: list[tuple[Row, str]] = []
        for module in self.adapter.modules:
            for role in (DOWN, DIFF, DIFF_BIAS, SET):
                if role not in module.tensors:
                    continue
                key = module.tensors[role]
                tensors = len({DOWN, UP, ALPHA} & module.tensors.keys()) if role == DOWN else 1
                try:
                    name, made, detail = getattr(self, f"_{role}")(module)
                except Unmatched as why:
                    rows.append((Row(key, UNMATCHED, "", str(why), tensors), ""))
                    continue
                for target, edit in made:
                    edits.setdefault(target, []).append(edit)
                rows.append((Row(key, MERGED, name, detail, tensors), name))
        entries = {name: self._entry(name, found) for name, found in edits.items()}
        outcome = {
            name: CREATED if name not in self.plan.entries else BESIDE if entry.beside else MERGED
            for name, entry in entries.items()
        }
        final = [Row(r.key, outcome[n] if n else r.outcome, r.target, r.detail, r.tensors) for r, n in rows]
        final += [Row(key, UNMATCHED, "", why) for key, why in self.adapter.unknown.items()]
        layers = (name.removesuffix(".weight") for name, entry in entries.items() if not entry.beside)
        return Fit(entries, frozenset(layer for layer in layers if layer in self.plan.quantised), tuple(final))

    def _entry(self, name: str, edits: list[Edit]) -> Entry:
        base = self.plan.entries.get(name)
        layer = name.removesuffix(".weight")
        quantised: Mapping[str, Spec] = self.plan.quantised
        wanted = layer in quantised or (self.beside and _PRODUCTS.fullmatch(layer) is not None)
        beside = base is not None and wanted and not (self.fp8 and is_projection(name))
        if base is None:
            made = edits[0].values
            return adapted(None, edits, made.dtype, made.shape, False)
        entry = adapted(base, edits, base.dtype, base.shape, beside)
        if entry.beside or base.dtype in FLOATS:
            return entry
        return adapted(base, edits, "BF16", base.shape, False)

    def _down(self, module: Module):
        name, (rows, columns) = self._weight(module)
        down, up = (self.adapter.stored(module.tensors[role]) for role in (DOWN, UP))
        if up.shape[0] != rows:
            raise Unmatched(f"makes {up.shape[0]} rows, the layer has {rows}")
        projection = self._projection(module, down.shape[1], columns)
        scale, source = self.adapter.scale(module, self.alpha)
        A = Assembly(down.dtype, down.shape, (Piece(self.prefix + module.tensors[DOWN], 0, down.shape[0]),))
        B = self._assembled(module, UP)
        edit = LowRank(A, B, self.strength * scale, module.target.part * rows, projection)
        detail = f"rank {down.shape[0]}, scale {scale:g} from {source}" + self._said(projection)
        return name, [(name, edit), *self._shift(name, edit)], detail

    def _diff(self, module: Module):
        name, shape = self._weight(module)
        have = self.adapter.stored(module.tensors[DIFF]).shape
        projection = None
        if len(have) == 2 and len(shape) == 2 and have[0] == shape[0]:
            projection = self._projection(module, have[1], shape[1])
        elif have != shape:
            raise Unmatched(f"is {list(have)}, the layer {list(shape)}")
        edit = Added(self._assembled(module, DIFF), self.strength, module.target.part * shape[0], projection)
        return name, [(name, edit), *self._shift(name, edit)], "difference" + self._said(projection)

    def _diff_b(self, module: Module):
        name = f"{module.target.canonical}.bias"
        entry = self.plan.entries.get(name)
        if entry is None:
            raise Unmatched(self._absent(module) if module.target.canonical not in self._layers() else "has no bias")
        have = self.adapter.stored(module.tensors[DIFF_BIAS]).shape
        if have != entry.shape:
            raise Unmatched(f"is {list(have)}, the bias {list(entry.shape)}")
        return name, [(name, Added(self._assembled(module, DIFF_BIAS), self.strength, 0))], "difference"

    def _set_weight(self, module: Module):
        have = self.adapter.stored(module.tensors[SET]).shape
        name = f"{module.target.canonical}.weight"
        block = _BLOCK.match(name)
        creates = name not in self.plan.entries and name.endswith(f"{GATE}.weight") and block and not block[1]
        if creates and int(block[2]) < self.config.num_layers:
            shape: tuple[int, ...] = (self.config.inner_dim, self.config.hidden_size)
        else:
            name, shape = self._weight(module)
        if have != shape:
            width = len(have) == len(shape) and have[1:] == shape[1:] and have[0] % shape[0] == 0
            bank = f", as a bank of {have[0] // shape[0]} output heads" if width and "final_layer" in name else ""
            raise Unmatched(f"is {list(have)}{bank}, the layer {list(shape)}")
        edit = Assigned(self._assembled(module, SET), self.strength, module.target.part * shape[0])
        return name, [(name, edit)], "the whole weight"

    def _weight(self, module: Module) -> tuple[str, tuple[int, ...]]:
        """Canonical name, and the shape of this module's share of it."""
        name = f"{module.target.canonical}.weight"
        entry = self.plan.entries.get(name)
        if entry is None:
            raise Unmatched(self._absent(module))
        parts = len(module.target.group(self.adapter.fused_layout).source)
        if DOWN in module.tensors and len(entry.shape) != 2:
            raise Unmatched(f"is a pair of factors, the weight {list(entry.shape)}")
        return name, (entry.shape[0] // parts, *entry.shape[1:])

    def _absent(self, module: Module) -> str:
        canonical = module.target.canonical
        if canonical.startswith("time_embedder.") and self.config.adaln == "curve":
            return "a curve file keeps no time embedder, only what it gave"
        block = _BLOCK.match(canonical)
        if block and int(block[2]) >= (self.config.num_refiner_layers if block[1] else self.config.num_layers):
            return f"the model has {self.config.num_layers} blocks and {self.config.num_refiner_layers} for the text"
        return "the model has no such layer"

    def _layers(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.plan.entries}

    def _projection(self, module: Module, have: int, want: int) -> Projection | None:
        if have == want:
            return None
        if _ADALN not in module.target.canonical:
            raise Unmatched(f"takes {have} inputs, the layer {want}")
        if self.projection is not None and (self.projection.wide, self.projection.narrow) == (have, want):
            return self.projection
        if have < want:
            raise Unmatched(f"was made on a file whose AdaLN keeps {have} inputs; this one has {want}")
        raise Unmatched(
            f"takes AdaLN inputs of full width {have}; this {self.config.adaln} file keeps {want}, and which "
            f"{want} of the {have} it does not say: name a file with the time embedder as adaln_source"
        )

    def _shift(self, name: str, edit: LowRank | Added) -> list[tuple[str, Edit]]:
        if edit.projection is None or edit.projection.mean is None:
            return []
        return [(name.replace(".weight", ".bias"), Shifted(edit))]

    @staticmethod
    def _said(projection: Projection | None) -> str:
        return f", projected from {projection.wide} AdaLN inputs to {projection.narrow}" if projection else ""

    def _assembled(self, module: Module, role: str) -> Assembly:
        """A tensor of the file with its rows in canonical order."""
        name = module.tensors[role]
        stored = self.adapter.stored(name)
        group = module.target.group(self.adapter.fused_layout)
        rows = stored.shape[0] if stored.shape else 1
        try:
            order = canonical_order(group.rule, rows, self.config.head_dim)
        except ValueError as error:
            raise Unmatched(str(error)) from error
        pieces = cut(order, [self.prefix + name], ["out"], rows)["out"]
        return Assembly(stored.dtype, stored.shape, pieces)
