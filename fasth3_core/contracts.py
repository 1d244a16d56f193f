"""What each known student was distilled for, and which of them a checkpoint is.

A contract is what the sampler runs unless a setting departs from it; every departure is listed in the report.
Figures: spec sheets and model cards of the FastH3 releases.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .config import TILE_SHAPES, DiTConfig
from .errors import ConfigError, ContractError

_TRIMMED_LAYERS = 42


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    name: str
    points: int
    """Points of the grid; one forward less."""
    rungs: tuple[int, ...] = ()
    """Trained base positions x 1000, without the final 0; empty when none are published."""
    default_grid: str = "uniform"
    """"uniform" or "trained": which of the two the release runs."""
    shift_video: float
    shift_audio: float
    sparsity: float | None
    """Fraction of video tiles dropped; None for a student that attends densely."""
    tile_size: int = 64
    fine_steps: int = 0
    """Output heads of a bank, each the head of one fine step; 0 for a single head."""
    max_time: float = 1.0
    """Where the base grid starts."""
    tasks: tuple[str, ...]
    about: str

    @property
    def sparse(self) -> bool:
        return self.sparsity is not None


_PREVIEW_RUNGS = (999, 749, 500, 250)
_V2_RUNGS = (999, 874, 749, 624, 500, 375, 250, 125)

CONTRACTS: dict[str, Contract] = {
    contract.name: contract
    for contract in (
        Contract(
            name="preview-4", points=5, rungs=_PREVIEW_RUNGS, shift_video=12.0, shift_audio=3.0, sparsity=0.9,
            tasks=("t2va",), about="FastH3 4-step students (Preview, v1, v1.1, v1.2)",
        ),
        Contract(
            name="v2-8", points=9, rungs=_V2_RUNGS, default_grid="trained", shift_video=10.0, shift_audio=3.0,
            sparsity=0.8, tasks=("t2va",), about="FastH3 8-Step V2 and QAD v2",
        ),
        Contract(
            name="omniref-8", points=9, shift_video=12.0, shift_audio=3.0, sparsity=0.9, tile_size=128, fine_steps=32,
            max_time=0.999, tasks=("t2va", "ref2va"), about="FastH3 Omni: references to video, 32 output heads",
        ),
        Contract(
            name="trim-8", points=9, rungs=_V2_RUNGS, default_grid="trained", shift_video=10.0, shift_audio=3.0,
            sparsity=0.8, tasks=("t2va",), about="FastH3 Trim: 42 blocks, rank-16 AdaLN",
        ),
        Contract(
            name="preview-4-dense", points=5, rungs=_PREVIEW_RUNGS, shift_video=12.0, shift_audio=3.0, sparsity=None,
            tasks=("t2va",), about="FastH3 4-step student distilled without sparse attention",
        ),
        Contract(
            name="compact", points=9, rungs=_V2_RUNGS, default_grid="trained", shift_video=10.0, shift_audio=3.0,
            sparsity=None, tasks=("t2va",), about="CompactH3: 42 blocks, all gates zero, dense",
        ),
        Contract(
            name="base", points=50, shift_video=12.0, shift_audio=3.0, sparsity=None,
            tasks=("t2va", "fl2va", "ref2va"), about="MiniMax-H3 itself, 49 forwards",
        ),
        Contract(
            name="turbo-4", points=5, shift_video=6.0, shift_audio=3.0, sparsity=None, tasks=("t2va", "fl2va"),
            about="base with a 4-step Turbo adapter (set shift_video 12 for the 768p one)",
        ),
        Contract(
            name="turbo-8", points=9, shift_video=6.0, shift_audio=3.0, sparsity=None, tasks=("t2va", "fl2va"),
            about="base with an 8-step Turbo adapter",
        ),
    )
}
"""Name -> contract, in the order the loader node lists them."""

# A file with gates records neither its grid nor its sparsity, so these must be chosen by name.
_GATED = ("preview-4", "v2-8")


@dataclass(frozen=True)
class Record:
    """What is written down about the student that weights are or become."""

    fields: Mapping[str, Any]
    """As in `fastvideo_inference.json`."""
    source: str
    """Where they are from, for messages."""


def infer(
    config: DiTConfig, *, gates_zero: bool | None, recorded: Record | None, requested: str = "auto"
) -> Contract:
    """Decide the contract of a checkpoint.

    Args:
        config: dimensions from the tensors.
        gates_zero: whether every gate weight is zero; None when there are no gates.
        recorded: beside the weights, or of an adapter; None if absent.
        requested: "auto", or the name of a contract, which must then fit the tensors.

    Raises:
        ConfigError: no contract has the requested name.
        ContractError: the contract does not fit the tensors, or "auto" cannot know and says what to choose from.
    """
    if requested != "auto":
        if requested not in CONTRACTS:
            raise ConfigError("contract", requested, f"'auto' or one of {list(CONTRACTS)}", "Use 'auto' if unsure.")
        contract = CONTRACTS[requested]
    elif config.output_heads > 1:
        contract = CONTRACTS["omniref-8"]
    elif recorded is not None:
        contract = _from_record(recorded)
    else:
        contract = _from_tensors(config, gates_zero)
    check_fit(contract, config, gates_zero)
    return contract


def chosen_by(config: DiTConfig, recorded: Record | None, requested: str) -> str:
    """What `infer` went by, for the report."""
    if requested != "auto":
        return "name"
    if config.output_heads > 1:
        return "its bank of output heads"
    if recorded is not None:
        return "the record beside the weights"
    if config.has_gates:
        return "its tensors"
    return "default: without gates and a record, a student distilled for dense attention looks like the base model"


LEAST_SHIFT = 0.01
"""Below, fp32 loses where the grid starts; students have 3 to 12."""

_RECORDED = ("points", "rungs", "shift_video", "shift_audio", "sparsity", "tile_size")
"""Fields of a contract that a record speaks of."""


def against_record(contract: Contract, recorded: Record) -> tuple[str, ...]:
    """What a contract chosen by name does otherwise than the record says, for the report."""
    try:
        own = _from_record(recorded)
    except ContractError as error:
        return (f"the record is not followed: {error}",)
    pairs = ((name, getattr(contract, name), getattr(own, name)) for name in _RECORDED)
    return tuple(f"{name} {chosen} instead of the recorded {said}" for name, chosen, said in pairs if chosen != said)


def _from_tensors(config: DiTConfig, gates_zero: bool | None) -> Contract:
    if not config.has_gates:
        return CONTRACTS["base"]
    if gates_zero:
        return CONTRACTS["compact"]
    if config.num_layers == _TRIMMED_LAYERS and config.adaln == "rank":
        return CONTRACTS["trim-8"]
    names = " or ".join(f"'{name}' ({CONTRACTS[name].about})" for name in _GATED)
    raise ContractError(
        "the file has trained VSA gates but records neither its steps, its shift nor its sparsity, and these differ "
        f"between students. Set contract to {names}."
    )


def check_fit(contract: Contract, config: DiTConfig, gates_zero: bool | None) -> None:
    """Raises ContractError, with the mend, if a model of these tensors cannot run the contract."""
    heads = max(1, contract.fine_steps)
    if heads != config.output_heads:
        raise ContractError(
            f"contract '{contract.name}' has {heads} output heads, the model {config.output_heads}. "
            "A bank of 32 is FastH3 Omni ('omniref-8'), a single head any other student."
        )
    if contract.sparse and not config.has_gates:
        raise ContractError(
            f"contract '{contract.name}' runs video sparse attention, but the model has no to_gate_compress weights. "
            "Load a VSA student or its adapter, or choose 'preview-4-dense' or 'base'."
        )
    if contract.sparse and gates_zero:
        raise ContractError(
            f"contract '{contract.name}' runs video sparse attention, but every gate of the model is zero, which is "
            "how a student distilled for dense attention is stored. Choose 'compact'."
        )
    if not contract.sparse and config.has_gates and not gates_zero:
        raise ContractError(
            f"contract '{contract.name}' attends densely, but the model has trained VSA gates: dropping them is "
            "another function than the one distilled. Choose 'preview-4' or 'v2-8'; sparsity 0 in FastH3 VSA Config "
            "keeps every tile and the gates."
        )


def _from_record(recorded: Record) -> Contract:
    """A contract from what is recorded; fields that are not come from the known student it matches."""
    fields, source = recorded.fields, recorded.source
    steps = fields.get("dmd_denoising_steps")
    if not steps:
        raise ContractError(
            f"{source} has no dmd_denoising_steps: its schedule is unknown. Choose the contract by name."
        )
    falling = isinstance(steps, list) and all(type(r) is int and 0 < r <= 1000 for r in steps)
    if not falling or any(b >= a for a, b in pairwise(steps)):
        raise ContractError(
            f"{source} says dmd_denoising_steps={steps!r}: expected whole numbers that fall strictly "
            "from at most 1000 to above 0. Choose the contract by name."
        )
    rungs = tuple(steps)

    def number(key: str, default: float, wanted: str, fits: Callable[[float], bool]) -> float:
        value = default if fields.get(key) is None else fields[key]
        if type(value) not in (int, float) or not fits(value):
            raise ContractError(
                f"{source} says {key}={value!r}: expected {wanted}. Choose the contract by name."
            )
        return value

    points = len(rungs) + 1
    number("num_inference_steps", points, f"{points}, one more than the rungs", lambda n: n == points)
    number("guidance_scale", 1.0, "1, as no distilled H3 student has guidance", lambda scale: scale == 1)
    dense = "VIDEO_SPARSE_ATTN" not in str(fields.get("attention_backend", "VIDEO_SPARSE_ATTN_H3"))
    known = next((c for c in CONTRACTS.values() if c.rungs == rungs and c.sparse != dense), CONTRACTS["preview-4"])
    possible = f"{LEAST_SHIFT:g} or more", lambda shift: LEAST_SHIFT <= shift < math.inf
    sparsity = number("vsa_sparsity", known.sparsity or 0.0, "0 <= sparsity < 1", lambda share: 0 <= share < 1)
    return Contract(
        name=known.name if known.rungs == rungs else "recorded",
        points=points,
        rungs=rungs,
        default_grid=known.default_grid if known.rungs == rungs else "trained",
        shift_video=number("video_scheduler_shift", known.shift_video, *possible),
        shift_audio=number("audio_scheduler_shift", known.shift_audio, *possible),
        sparsity=None if dense else sparsity,
        tile_size=number("vsa_tile_size", known.tile_size, f"one of {list(TILE_SHAPES)}", TILE_SHAPES.__contains__),
        tasks=("t2va",),
        about=f"recorded with the weights ({fields.get('model_id', 'no model id')})",
    )
