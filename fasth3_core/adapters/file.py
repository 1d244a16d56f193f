"""An adapter file, read as far as its header: layers, factors, scales, and whether it is whole."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.component import Component, open_component, read_json
from ..checkpoint.dtypes import FLOATS
from ..checkpoint.files import Stored
from ..checkpoint.problems import grouped
from ..checkpoint.recognise import SORTS, recognise
from ..errors import CheckpointError
from . import keys
from .keys import ALPHA, DIFF, DIFF_BIAS, DOWN, SET, UP, Target

FASTVIDEO = "fastvideo-lora-v2"
"""FastVideo's form of the FastH3 students: low-rank pairs at a scale of exactly 1, exact differences, whole gates."""

_COUNTS = {"low_rank_tensors": (DOWN, UP), "diff_tensors": (DIFF, DIFF_BIAS), "set_weight_tensors": (SET,)}
"""Metadata of FastVideo's form -> the roles that it counts."""

_READ = ("F64", *FLOATS, "F8_E4M3", "F8_E5M2")
"""Types of values: floats. Whole numbers would be factors of a quantised adapter, whose scale is not here."""

_WHOLE = ("I64", "I32")
"""Types that an alpha may have beside those."""

_ALPHA_KEYS = ("alpha", "lora_alpha", "network_alpha", "ss_network_alpha")
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What PEFT calls an adapter and, in the same folder, its configuration."""

_CONFIG_KEYS = ("lora_adapter_metadata", "adapter_config", "peft_config")
"""Metadata that holds PEFT's configuration as JSON."""


@dataclass(frozen=True)
class Module:
    """Everything that a file holds for one stored layer."""

    target: Target
    tensors: Mapping[str, str]
    """Role -> name in the file."""


@dataclass(frozen=True)
class Adapter:
    """Headers only."""

    component: Component
    modules: tuple[Module, ...]
    unknown: Mapping[str, str]
    """Name -> why it is no layer of the transformer."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Name of an alpha tensor -> its value: the only values that are read."""

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.component.metadata

    @property
    def name(self) -> str:
        return self.component.root.name

    @property
    def fastvideo(self) -> bool:
        return self.metadata.get("format") == FASTVIDEO

    @property
    def fused_layout(self) -> str:
        """Row order of fused qkv factors: grouped unless the file says that they follow the official, head by head."""
        return "original" if self.metadata.get("fasth3.layout") == "original" else "single-file"

    def stored(self, name: str) -> Stored:
        return self.component.tensors[name]

    def uncounted(self) -> list[str]:
        """Counts that FastVideo's form states and this file, which claims it, does not."""
        return [key for key in _COUNTS if self.fastvideo and key not in self.metadata]

    def ranks(self) -> Counter[int]:
        return Counter(self.stored(m.tensors[DOWN]).shape[0] for m in self.modules if DOWN in m.tensors)

    def roles(self) -> Counter[str]:
        return Counter(role for m in self.modules for role in m.tensors)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """What the metadata says, over PEFT's configuration in it, over the same in `adapter_config.json` beside it."""
        found: dict[str, Any] = {}
        beside = self.component.folder / PEFT_CONFIG
        if self.component.root.name in (PEFT_FILE, self.component.folder.name) and beside.is_file():
            found |= read_json(beside)
        for key in _CONFIG_KEYS:
            try:
                config = json.loads(self.metadata.get(key, "{}"))
            except ValueError:
                continue
            found |= config if isinstance(config, dict) else {}
        return {**found, **self.metadata}

    def stated_alpha(self) -> float | None:
        """Alpha for the whole file; None where nothing says it."""
        for key in _ALPHA_KEYS:
            try:
                return float(self.settings[key])  # a table of alphas, or a word, is no number: as if it said nothing
            except (KeyError, ValueError, TypeError):
                continue
        return None

    def scale(self, module: Module, alpha: float = 0.0) -> tuple[float, str]:
        """(alpha / rank, where alpha comes from); over the root of the rank for rank-stabilised LoRA.

        Args:
            alpha: what the user says, for files that do not; 0 for nothing.
        """
        if self.fastvideo:
            return 1.0, "the format's 1"
        rank = self.stored(module.tensors[DOWN]).shape[0]
        if self.settings.get("use_rslora") is True:
            rank = math.sqrt(rank)
        if ALPHA in module.tensors:
            return self.alphas[module.tensors[ALPHA]] / rank, "the layer's alpha"
        if (stated := self.stated_alpha()) is not None:
            return stated / rank, "the alpha stated for the file"
        return (alpha / rank, "the alpha given") if alpha else (1.0, "no alpha: taken as the rank")


def open_adapter(path: str | Path) -> Adapter:
    """Read what an adapter holds.

    Raises:
        CheckpointError: no adapter, one of a form that is not read, or one that is not whole; says which.
    """
    component = open_component(path)
    sort, _ = recognise(component.tensors, component.metadata)
    _refuse_foreign(component)
    if sort != "adapter":
        known = next((known for known in SORTS if known.name == sort), None)
        is_ = f"this is {known.what}, which {known.place}" if known else "none of its tensors is an adapter's"
        raise CheckpointError(f"{component.label}: not an adapter (LoRA): {is_}. Choose another file.")
    modules, unknown, problems = _modules(component)
    alphas = {}
    for module in modules:
        if ALPHA in module.tensors:
            name = module.tensors[ALPHA]
            value = component.read(name, dtype=torch.float32)
            if value.numel() != 1 or not value.isfinite().all():
                problems.append(f"{name} is {component.tensors[name].dtype} {list(value.shape)}, expected one number")
                continue
            alphas[name] = float(value)
    adapter = Adapter(component, tuple(modules), unknown, alphas)
    problems += _counts(adapter) if adapter.fastvideo else []
    problems += [
        f"its configuration has {key}, which gives layers alphas of their own and is not read"
        for key in ("alpha_pattern",) if adapter.settings.get(key) and not adapter.fastvideo
    ]  # fmt: skip
    if problems:
        raise CheckpointError(
            f"{component.label} is not a whole adapter:\n  " + "\n  ".join(problems)
            + "\nThe file is damaged or incomplete: download it again."
        )
    return adapter


def _refuse_foreign(component: Component) -> None:
    found = Counter(what for name in component.tensors if (what := keys.foreign(name)))
    if found:
        listing = ", ".join(f"{what}: {count} tensors" for what, count in found.most_common())
        raise CheckpointError(
            f"{component.label} is an adapter of a form that is not read ({listing}). Read are plain LoRA (pairs of "
            f"two factors, with or without alpha) and {FASTVIDEO}: take one of those, or a model that has it merged."
        )
    stated = component.metadata.get("format", "")
    if stated.startswith("fastvideo-lora") and stated != FASTVIDEO:
        raise CheckpointError(f"{component.label} is of format {stated!r}; read is {FASTVIDEO!r}.")


def _modules(component: Component) -> tuple[list[Module], dict[str, str], list[str]]:
    """(layers, names that are none, what is wrong)."""
    found: dict[Target, dict[str, str]] = {}
    unknown: dict[str, str] = {}
    problems: list[str] = []
    for name in component.tensors:
        if keys.of_text_encoder(name):
            unknown[name] = "of the text encoder, which this package does not run"
            continue
        if (parsed := keys.role(name)) is None:
            unknown[name] = "no part of an adapter that is known"
            continue
        stem, role = parsed
        target = keys.locate(stem)
        if target is None:
            unknown[name] = "no layer of MiniMax-H3"
            continue
        tensors = found.setdefault(target, {})
        if role in tensors:
            problems.append(f"{name} and {tensors[role]} are the same tensor of the same layer")
        tensors[role] = name
    of_layer: dict[str, Target] = {}
    for target, tensors in found.items():
        other = of_layer.setdefault(target.canonical, target)
        if other.layout != target.layout:
            problems.append(f"{other.layer} and {target.layer} are the same layer, named in two ways")
        for role, name in tensors.items():
            if (dtype := component.tensors[name].dtype) not in _READ and not (role == ALPHA and dtype in _WHOLE):
                problems.append(f"{name} is {dtype}; read are {', '.join(_READ)}")
        down, up = tensors.get(DOWN), tensors.get(UP)
        if (down is None) != (up is None):
            problems.append(f"{down or up} has no {'up' if up is None else 'down'} factor beside it")
        elif ALPHA in tensors and down is None:
            problems.append(f"{tensors[ALPHA]} has no factors beside it")
        if down and up:
            a, b = component.tensors[down].shape, component.tensors[up].shape
            if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
                problems.append(f"{down} {list(a)} and {up} {list(b)} are no [rank, in] and [out, rank]")
    return [Module(target, tensors) for target, tensors in found.items()], unknown, problems


def _counts(adapter: Adapter) -> list[str]:
    """What the metadata of FastVideo's form says otherwise than the tensors."""
    roles, problems = adapter.roles(), []
    for key, counted in _COUNTS.items():
        said, have = adapter.metadata.get(key), sum(roles[role] for role in counted)
        if said is not None and said != str(have):
            problems.append(f"the metadata says {key}={said}, the file has {have}")
    said, ranks = adapter.metadata.get("rank"), sorted(adapter.ranks())
    if said is not None and ranks and said != str(ranks[-1]):
        problems.append(f"the metadata says rank={said}, the factors have {', '.join(map(str, ranks))}")
    if adapter.unknown:
        problems += grouped(adapter.unknown, "of no layer of MiniMax-H3")
    if roles[ALPHA]:
        problems.append(f"{roles[ALPHA]} alphas, which this format does not have")
    return problems
