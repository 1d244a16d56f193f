"""Which weights are on the device, which wait in host memory, and how that is chosen from what is free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError

GIB = 1 << 30

POLICIES = ("auto", "resident", "stream", "mmap")
AFTER_RUN = ("keep", "free_device", "free_all")

_HOST_SPARE = 4 * GIB
"""Host memory that is left to everything else before "auto" keeps weights in a mapped file instead."""

_BESIDE_VISITORS = GIB // 2
"""Device memory to use weights in that visit before the forwards: a prompt is short."""

_UNMOVED = 2
"""Blocks that could be resident as well and for which a placement is not changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """What a user asks for. The defaults decide everything from what is free."""

    policy: str = "auto"
    """"resident": all on the device. "stream": blocks come from host memory while the one before computes. "mmap": the
    same from a temporary file that the system may page out. "auto": the first of these that fits."""
    device_gib: float = 0.0
    """Device memory that weights and activations may take, GiB; 0 is all that is free."""
    slots: int = 2
    """Blocks that streaming holds on the device at once: one computes, the others are on their way."""
    resident_blocks: int = -1
    """Blocks that stay on the device while the others stream; -1 is as many as fit."""
    pinned_gib: float = -1.0
    """Host memory that may be page-locked, GiB; -1 is what the system allows, 0 none. What is over it is copied through
    a small page-locked buffer, which is slower."""
    after_run: str = "keep"
    """"free_device" gives the device memory back when a run ends, "free_all" the host copies, too."""

    def __post_init__(self) -> None:
        for name, value, choices in (("policy", self.policy, POLICIES), ("after_run", self.after_run, AFTER_RUN)):
            if value not in choices:
                raise ConfigError(name, value, f"one of {list(choices)}", f"Use {choices[0]!r} if unsure.")
        for name, value, least, hint in (
            ("device_gib", self.device_gib, 0.0, "Use 0 for all that is free."),
            ("pinned_gib", self.pinned_gib, -1.0, "Use -1 for what the system allows."),
            ("resident_blocks", self.resident_blocks, -1, "Use -1 for as many as fit."),
            ("slots", self.slots, 2, "Use 2 if unsure."),
        ):
            if not least <= value <= 1e9:  # also refuses NaN
                raise ConfigError(name, value, f"{least:g} to 1e9", hint)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where each block is kept. The default keeps everything on the device."""

    streamed: tuple[int, ...] = ()
    """Blocks that are kept in host memory, ascending."""
    slots: int = 0
    mapped: bool = False
    """Whether they are in a mapped file rather than in memory of the process."""
    pinned_bytes: int = field(default=0, compare=False)
    """Limit of page-locked host memory. No reason to move what is placed already."""
    folder: Path | None = None
    """Of the mapped files; None is the system's folder for temporary files."""


RESIDENT = Placement()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a transformer's weights on a device."""

    top: int
    """Everything outside the main blocks that every forward needs."""
    blocks: tuple[int, ...]
    """Each main block without its AdaLN."""
    text: int = 0
    """What refines the prompt, once a request. It visits the device where blocks do."""

    def device(self, placement: Placement) -> int:
        """Bytes that the weights take on the device."""
        streamed = [self.blocks[i] for i in placement.streamed]
        slots = min(placement.slots, len(streamed)) * max(streamed, default=0)
        return self.top + sum(self.blocks) - sum(streamed) + (slots if streamed else self.text)

    def visiting(self, placement: Placement) -> int:
        """Bytes that are on the device before the forwards and not while they run."""
        return self.text if placement.streamed else 0

    def beside(self, placement: Placement, working: int) -> int:
        """Bytes that a run needs beside the weights that stay, of which its forwards take `working`."""
        visiting = self.visiting(placement)
        return max(working, visiting + _BESIDE_VISITORS if visiting else 0)

    def needed(self, placement: Placement, working: int) -> int:
        """Bytes of the device in all."""
        return self.device(placement) + self.beside(placement, working)

    def host(self, placement: Placement) -> int:
        """Bytes that they keep in host memory, or in a mapped file."""
        return sum(self.blocks[i] for i in placement.streamed) + self.visiting(placement)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a machine can give, in bytes."""

    device: int | None
    """On the device, once everything else that can leave has left; None where weights run from host memory."""
    host: int
    """Host memory that is available now."""
    pinnable: int = 0
    """Host memory that may be page-locked."""
    folder: Path | None = None
    """For mapped files."""
    spare_device: bool = False
    """Whether the user asked the host to keep device memory free: "auto" then streams every block."""


def choose(
    offload: Offload,
    sizes: Sizes,
    room: Room,
    working: int,
    now: Placement = RESIDENT,
    what_fits: Callable[[int], Sequence[str]] = lambda budget: (),
) -> Placement:
    """The placement that an offload setting means on a machine.

    Args:
        working: bytes that a run takes on the device beside the weights.
        now: how the weights are placed. It stays where it is what was asked for: the memory that is free differs a
            little from run to run, and moving blocks for that costs more than it gains.
        what_fits: other requests that would fit into a budget, for the message.

    Raises:
        ConfigError: it does not fit; says by how much, and what would.
    """
    limits = [n for n in (room.device, int(offload.device_gib * GIB) or None) if n is not None]
    budget = min(limits) if limits else None
    if offload.policy == "resident" or (offload.policy == "auto" and room.device is None and not offload.device_gib):
        return _resident(sizes, budget, working, what_fits)
    if offload.policy == "auto" and not room.spare_device and fits(sizes, RESIDENT, budget, working):
        return RESIDENT
    total = len(sizes.blocks)
    count = min(total, offload.resident_blocks)
    if count < 0:
        count = 0 if room.spare_device else _most_resident(offload, sizes, budget, working)
        held = total - len(now.streamed)
        if now.streamed and now.slots == offload.slots and held <= count <= held + _UNMOVED and not room.spare_device:
            count = held
    streamed = streamed_blocks(total, count)
    mapped = offload.policy == "mmap" or (
        offload.policy == "auto" and sizes.host(Placement(streamed=streamed)) + _HOST_SPARE > room.host
    )
    pinned = room.pinnable if offload.pinned_gib < 0 else int(offload.pinned_gib * GIB)
    placement = Placement(
        streamed=streamed, slots=min(offload.slots, len(streamed)), mapped=mapped,
        pinned_bytes=0 if mapped else pinned, folder=room.folder if mapped else None,
    )
    if not fits(sizes, placement, budget, working):
        raise _too_large(sizes, placement, budget, working, what_fits)
    if not mapped and (need := sizes.host(placement)) > room.host:
        raise ConfigError(
            "policy", offload.policy, f"{need / GIB:.1f} GiB of host memory, {room.host / GIB:.1f} GiB are available",
            "Use policy 'mmap', an int8 file, or close other programs.",
        )
    return placement


def fits(sizes: Sizes, placement: Placement, budget: int | None, working: int) -> bool:
    return budget is None or sizes.needed(placement, working) <= budget


def streamed_blocks(total: int, resident: int) -> tuple[int, ...]:
    """All but `resident` blocks. Those that stay are the first, the last and evenly spread ones between: while one of
    them computes, the next block has twice the time to arrive."""
    if resident >= total:
        return ()
    kept = {round(i * (total - 1) / max(1, resident - 1)) for i in range(resident)}
    return tuple(i for i in range(total) if i not in kept)


def _most_resident(offload: Offload, sizes: Sizes, budget: int | None, working: int) -> int:
    total = len(sizes.blocks)
    if budget is None:
        return 0
    for count in range(total - 1, 0, -1):
        streamed = streamed_blocks(total, count)
        if fits(sizes, Placement(streamed=streamed, slots=offload.slots), budget, working):
            return count
    return 0


def _resident(sizes: Sizes, budget: int | None, working: int, what_fits) -> Placement:
    if not fits(sizes, RESIDENT, budget, working):
        raise _too_large(sizes, RESIDENT, budget, working, what_fits)
    return RESIDENT


def _too_large(sizes: Sizes, placement: Placement, budget: int, working: int, what_fits) -> ConfigError:
    weights = sizes.device(placement)
    smallest = sizes.needed(Placement(streamed=tuple(range(len(sizes.blocks))), slots=2), working)
    if smallest <= budget:
        mend = "Offload with policy 'auto' (FastH3 Offload), or with fewer resident_blocks and slots."
    else:
        fitting = " or ".join(what_fits(budget)) or "nothing that this model makes; use a larger device"
        mend = f"Streaming every block would take {smallest / GIB:.1f} GiB. What would fit: {fitting}."
    return ConfigError(
        "device memory", f"{sizes.needed(placement, working) / GIB:.1f} GiB ({weights / GIB:.1f} weights, "
        f"{working / GIB:.1f} activations)", f"at most the {budget / GIB:.1f} GiB that this run may take", mend,
    )


def describe(placement: Placement, sizes: Sizes) -> str:
    """One line for the report and the plan."""
    total = sizes.blocks
    if not placement.streamed:
        return f"all {len(total)} blocks resident"
    where = "a mapped file" if placement.mapped else "host memory"
    return (
        f"{len(placement.streamed)} of {len(total)} blocks streamed from {where} through {placement.slots} slots, "
        f"{len(total) - len(placement.streamed)} resident"
    )
