"""Contract plus explicit settings -> what a run does, with every departure put into words."""

import math
from dataclasses import dataclass

import torch

from ..config import VSAConfig
from ..contracts import LEAST_SHIFT, Contract
from ..errors import ConfigError, ContractError
from ..model.handle import H3Model
from ..model.head_bank import Bank
from . import schedule
from .schedule import Schedule

GRIDS = ("contract", "uniform", "trained")


@dataclass(frozen=True)
class RunSettings:
    video: Schedule
    audio: Schedule
    vsa: VSAConfig | None
    """Resolved; None attends densely, without gates."""
    departures: tuple[str, ...]
    bank: Bank | None = None
    """Of a student with several output heads."""


def resolve(
    model: H3Model,
    vsa: VSAConfig | None = None,
    grid: str = "contract",
    shift_video: float = 0.0,
    shift_audio: float = 0.0,
    task: str = "t2va",
    schedules: tuple[Schedule, Schedule] | None = None,
) -> RunSettings:
    """Fill in the contract.

    Args:
        grid: "contract", "uniform" (equally spaced) or "trained" (the published rungs).
        shift_video, shift_audio: 0 takes the contract's.
        task: "t2va", "fl2va" (keyframes) or "ref2va" (references).
        schedules: explicit video and audio grids in place of the above.

    Raises:
        ConfigError: an unknown grid, or a shift that is not positive.
        ContractError: VSA settings for a student that attends densely, or trained rungs that nobody published.
    """
    contract = model.contract
    if schedules is None:
        video, audio, departures = _schedules(contract, grid, shift_video, shift_audio)
    else:
        if contract.fine_steps:
            raise ContractError(f"contract '{contract.name}': its heads belong to its own grid, not to given sigmas.")
        (video, audio), departures = schedules, ["explicit sigmas instead of the contract's"]
        if video.num_forwards != audio.num_forwards:
            raise ContractError(
                f"{len(video.sigmas)} video and {len(audio.sigmas)} audio sigmas: the streams share every forward."
            )
    if task not in contract.tasks:
        kind = {"fl2va": "keyframes", "ref2va": "references"}.get(task, task)
        departures.append(f"{kind}: {contract.about} was distilled for {', '.join(contract.tasks)} only")
    sparse, said = _sparse(model, vsa)
    return RunSettings(video, audio, sparse, (*departures, *said), _bank(contract, shift_video, shift_audio))


def _schedules(
    contract: Contract, grid: str, shift_video: float, shift_audio: float
) -> tuple[Schedule, Schedule, list[str]]:
    departures = []
    base, grid_name = _base(contract, grid)
    if grid_name != contract.default_grid:
        departures.append(f"{grid_name} grid instead of the {contract.default_grid} one")
    shifts = []
    for name, given in (("shift_video", shift_video), ("shift_audio", shift_audio)):
        own = getattr(contract, name)
        if given and not LEAST_SHIFT <= given < math.inf:  # also refuses NaN
            expected = f"{LEAST_SHIFT:g} or more, or 0 for the contract's"
            raise ConfigError(name, given, expected, f"Use 0 for {own:g}.")
        shifts.append(given or own)
        if given and given != own:
            departures.append(f"{name} {given:g} instead of {own:g}")
    video, audio = (schedule.shifted(base, shift, contract.max_time) for shift in shifts)
    for name, shift, made in zip(("shift_video", "shift_audio"), shifts, (video, audio), strict=True):
        if made.num_forwards < len(base) - 1:
            raise ConfigError(
                name, shift, f"a shift that keeps all {len(base)} points of the grid apart in fp32",
                f"Use 0 for {getattr(contract, name):g}.",
            )
    return video, audio, departures


def _bank(contract: Contract, shift_video: float, shift_audio: float) -> Bank | None:
    if not contract.fine_steps:
        return None
    fine = schedule.bank_base(contract.fine_steps, contract.fine_steps + 1, contract.max_time)
    shifts = {"video": shift_video or contract.shift_video, "audio": shift_audio or contract.shift_audio}
    return Bank(
        {stream: schedule.shifted(fine, shift, contract.max_time).sigmas for stream, shift in shifts.items()},
        per_forward=contract.fine_steps // (contract.points - 1),
    )


def _base(contract: Contract, grid: str) -> tuple[torch.Tensor, str]:
    """Positions before the shift, and the name of the grid that "contract" stood for."""
    if grid not in GRIDS:
        raise ConfigError("grid", grid, f"one of {list(GRIDS)}", "Use 'contract' if unsure.")
    name = contract.default_grid if grid == "contract" else grid
    if contract.fine_steps:
        if name != contract.default_grid:
            raise ContractError(f"contract '{contract.name}': its heads belong to its own grid. Use 'contract'.")
        return schedule.bank_base(contract.fine_steps, contract.points, contract.max_time), name
    if name == "uniform":
        return schedule.uniform_base(contract.points), name
    if not contract.rungs:
        raise ContractError(f"contract '{contract.name}' has no published rungs. Use the uniform grid.")
    return schedule.rungs_base(contract.rungs), name


def _sparse(model: H3Model, vsa: VSAConfig | None) -> tuple[VSAConfig | None, list[str]]:
    contract = model.contract
    if not contract.sparse:
        if vsa is None:
            return None, []
        why = "all its gates are zero" if model.config.has_gates else "the model has no to_gate_compress weights"
        raise ContractError(
            f"VSA settings are connected, but contract '{contract.name}' attends densely: {why}. "
            "Disconnect FastH3 VSA Config, or load a VSA student or its adapter."
        )
    trained = VSAConfig().resolved(sparsity=contract.sparsity, tile_size=contract.tile_size)
    config = (vsa or VSAConfig()).resolved(sparsity=contract.sparsity, tile_size=contract.tile_size)
    if outside := [layer for layer in config.dense_layers if layer >= model.config.num_layers]:
        raise ConfigError(
            "dense_layers", outside, f"block numbers 0 to {model.config.num_layers - 1}", "Leave it empty, as trained."
        )
    said = []
    if config.keep_rule == "top_k":
        said.append(f"{config.top_k} video tiles kept instead of sparsity {contract.sparsity:g}")
    elif config.sparsity != trained.sparsity:
        said.append(f"sparsity {config.sparsity:g} instead of {trained.sparsity:g}")
    if config.tile_size != trained.tile_size:
        said.append(f"tiles of {config.tile_size} tokens instead of {trained.tile_size}")
    if config.mode != trained.mode:
        said.append(f"mode '{config.mode}' instead of '{trained.mode}'")
    if config.dense_first_steps:
        said.append(f"first {config.dense_first_steps} steps keep every tile")
    if config.dense_layers:
        said.append(f"blocks {', '.join(map(str, config.dense_layers))} keep every tile")
    return config, said
