"""From a model and an adapter file to a model with the adapter: headers are read now, values when they are needed."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoint.kinds import Entry, Plan
from ..checkpoint.load import Opened, open_store
from ..config import DiTConfig
from ..errors import CheckpointError, ConfigError
from ..model.handle import H3Model
from ..weights.fp8 import FP8
from . import contract as contracts
from .file import Adapter, open_adapter
from .fit import GATE, Fit, Fitter
from .joined import JoinedComponent, join
from .keys import DOWN, SET
from .projection import Projection
from .report import UNMATCHED, AdapterReport, grouped
from .time_basis import LARGEST_RESIDUAL, PREFIX, TABLE, RetimedTable, as_entries, fit_basis, open_embedder

log = logging.getLogger("fasth3")

MODES = ("auto", "merge", "beside")
"""Merged into float weights, kept beside quantised ones; merged everywhere or refused; kept beside all large ones."""

UNMATCHED_RULES = ("refuse", "skip")

_LINES = 12
"""Kinds of unmatched tensors that a message lists."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an adapter is applied."""

    strength: float = 1.0
    alpha: float = 0.0
    """For a file that states none: its factors are scaled by alpha / rank. 0 takes the rank, a scale of 1."""
    mode: str = "auto"
    unmatched: str = "refuse"
    """What tensors that fit nothing do: "refuse" the adapter, or "skip" and list them."""
    adaln_source: str = ""
    """File or folder with the time embedder that a curve file was made with."""

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("unmatched", UNMATCHED_RULES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(name, value, f"one of {list(allowed)}", f"Use {allowed[0]!r} if unsure.")
        if not abs(self.strength) < 1000:  # also refuses NaN
            raise ConfigError("strength", self.strength, "a number between -1000 and 1000", "1 is as trained.")
        if not 0 <= self.alpha < 1e6:
            raise ConfigError("alpha", self.alpha, "0 for the file's own, or a positive number", "Use 0 if unsure.")


def apply_adapter(
    model: H3Model, path: str | Path, settings: Settings | None = None, *, contract: str = "auto"
) -> tuple[H3Model, AdapterReport]:
    """`model` with the adapter at `path`; nothing but headers is read. Strength 0 gives the model itself.

    Args:
        contract: "auto": what the adapter says, else what the model has; or a name.

    Loading the same model with the same adapters and settings again gives a handle on the same store.

    Raises:
        CheckpointError: no adapter, not whole, or tensors of it fit nothing (none at all, or any under "refuse").
        ContractError: the model with the adapter cannot run the contract, as a VSA adapter on a dense one.
    """
    settings = settings or Settings()
    adapter = open_adapter(path)
    opened: Opened | None = model.opened
    if opened is None:
        raise ConfigError("model", model.source, "a model from files", "Load it with FastH3 Load Model.")
    before = model.store.plan
    joined, prefix = join(opened.component, adapter.component)
    joined, projection, embedder = _time(joined, before, model.config, settings)
    with_embedder = replace(before, entries={**before.entries, **embedder})
    fit = Fitter(
        adapter, with_embedder, model.config, settings.strength, settings.alpha, settings.mode == "beside",
        opened.dtype == FP8, projection, prefix,
    ).fit()  # fmt: skip
    report = AdapterReport(adapter.name, settings.strength, fit.rows, _warnings(model, adapter, settings))
    _check(adapter, report, settings)
    _check_mode(adapter, fit.entries, settings)
    if embedder:
        fit = _retimed(joined, before, fit, projection, embedder)
    plan = _adapted_plan(adapter, before, fit, model.config)
    if settings.strength == 0:
        return model, report
    key = (opened.key, joined.fingerprint, settings, json.dumps(adapter.settings, sort_keys=True, default=str))
    asked = opened.contract if contract == "auto" else contract
    after = Opened(joined, lambda: plan, opened.dtype, asked, key)
    store = open_store(after)
    decided, departures = contracts.decide(model, adapter, store.config, store.gates_all_zero(), contract)
    details = {
        **model.details,
        "adapters": (*model.details.get("adapters", ()), report.details()),
        "quantised_layers": len(plan.quantised),
        "contract_by": contracts.decided_by(adapter, decided, model, asked),
    }
    if adapter.fastvideo and settings.strength != 1:
        departures = (*departures, f"{adapter.name} at strength {settings.strength:g}: its student is exact at 1 alone")
    log.info("%s; contract %s", report.summary(), decided.name)
    for text in report.warnings:
        log.warning("%s: %s", adapter.name, text)
    return H3Model(store.config, decided, store, model.source, details, (*model.departures, *departures), after), report


def _time(
    joined: JoinedComponent, plan: Plan, config: DiTConfig, settings: Settings
) -> tuple[JoinedComponent, Projection | None, dict[str, Entry]]:
    """(the component with the file of the time embedder, from full to narrow AdaLN inputs, a curve file's embedder)."""
    if config.adaln == "rank":
        return joined, Projection(config.time_embed_dim, config.adaln_rank, plan.entries["adaln_basis.weight"]), {}
    if config.adaln != "curve":
        return joined, None, {}
    table = plan.entries[TABLE]
    if isinstance(table, RetimedTable):
        return joined, table.projection, dict(table.embedder)
    if not settings.adaln_source:
        return joined, None, {}
    component, found = open_embedder(settings.adaln_source)
    joined, prefix = join(joined, component)
    embedder = as_entries(component, found, prefix)
    with joined.open() as reader:
        weights = {name: entry.load(reader, torch.float32) for name, entry in embedder.items()}
        projection = fit_basis(table.load(reader, torch.float32), weights, component.label)
    return joined, projection, embedder


def _retimed(
    joined: JoinedComponent, before: Plan, fit: Fit, projection: Projection, embedder: Mapping[str, Entry]
) -> Fit:
    """The fit with another table in place of changes to the time embedder, which a curve file does not have."""
    changed = {name: entry for name, entry in fit.entries.items() if name.startswith(PREFIX)}
    entries = {name: entry for name, entry in fit.entries.items() if name not in changed}
    if changed:
        entries[TABLE] = RetimedTable(before.entries[TABLE], projection, {**embedder, **changed})
        with joined.open() as reader:
            _, residual = entries[TABLE].fitted(reader)
        if residual > LARGEST_RESIDUAL:
            raise CheckpointError(
                f"{joined.adapters[-1][1].label}: with its time embedder {residual:.1%} of the time features lie "
                f"outside the {projection.narrow} that this curve file keeps (at most {LARGEST_RESIDUAL:.0%} is "
                "taken). Apply it to the file with full AdaLN."
            )
        log.info("the AdaLN table is made anew; %.2g of the time features lie outside its basis", residual)
    return replace(fit, entries=entries)


def _warnings(model: H3Model, adapter: Adapter, settings: Settings) -> tuple[str, ...]:
    said = []
    pairs = [module for module in adapter.modules if DOWN in module.tensors]
    silent = [module for module in pairs if "no alpha" in adapter.scale(module, settings.alpha)[1]]
    if silent:
        ranks = ", ".join(map(str, sorted(adapter.ranks())))
        said.append(
            f"{len(silent)} of {len(pairs)} pairs state no alpha and are applied at scale 1 (alpha = rank {ranks}); "
            "if its maker names another alpha, set it"
        )
    if any(SET in m.tensors and m.target.canonical.endswith(GATE) for m in adapter.modules) and model.config.has_gates:
        said.append("the model has VSA gates already, which those of the adapter replace")
    if uncounted := adapter.uncounted():
        said.append(f"the metadata states no {', '.join(uncounted)}: whether the file is whole cannot be told")
    if adapter.fastvideo and "finetuned_model" in adapter.metadata and contracts.record(adapter) is None:
        said.append(
            f"the metadata names the student {adapter.metadata.get('finetuned_model', '')!r}, which is not known: "
            "name its contract"
        )
    return tuple(said)


def _check(adapter: Adapter, report: AdapterReport, settings: Settings) -> None:
    lost = [row for row in report.rows if row.outcome == UNMATCHED]
    if report.matched and not (lost and settings.unmatched == "refuse"):
        return
    lines = list(grouped(lost))
    listing = "\n  ".join(lines[:_LINES] + [f"and {len(lines) - _LINES} more kinds"] * (len(lines) > _LINES))
    what = "nothing of it fits this model" if not report.matched else f"{report.count(UNMATCHED)} tensors fit nothing"
    mend = (
        "Take an adapter that was made for MiniMax-H3." if not report.matched
        else "Take the file made for this form of the model, or set unmatched to 'skip' to go without them."
    )
    raise CheckpointError(f"{adapter.component.label}: {what}:\n  {listing}\n{mend}")


def _check_mode(adapter: Adapter, entries: Mapping[str, Entry], settings: Settings) -> None:
    kept = [name for name, entry in entries.items() if entry.beside]
    if settings.mode == "merge" and kept:
        raise ConfigError(
            "mode", "merge", f"'auto' for this model: {len(kept)} of its weights that {adapter.name} changes are "
            f"quantised ({kept[0]}, ...)", "Merging would round them again; 'auto' keeps the adapter beside them.",
        )


def _adapted_plan(adapter: Adapter, before: Plan, fit: Fit, config: DiTConfig) -> Plan:
    entries = {**before.entries, **fit.entries}
    gates = [f"blocks.{i}{GATE}.weight" for i in range(config.num_layers)]
    missing = [name for name in gates if name not in entries]
    if 0 < len(missing) < len(gates):
        raise CheckpointError(
            f"{adapter.component.label}: it brings VSA gates for {len(gates) - len(missing)} of {len(gates)} blocks; "
            f"missing: {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Download the file again."
        )
    return replace(
        before,
        entries=entries,
        shapes={name: entry.shape for name, entry in entries.items()},
        quantised={layer: spec for layer, spec in before.quantised.items() if layer not in fit.dequantised},
    )
