"""Whole frames instead of tiles: the plan of 24-block decoders, whose attention is by windows of 16 x 16 latents.

A block of latents is decoded as one sequence. Its tokens see their own window and the suffix tokens; the suffix sees
everything; every other layer's windows are shifted by half. What the published file leaves open is an option each, and
`probe.py` chooses by comparing with the released decoder. T latents, h rows, w columns, N tokens and suffix.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from ..errors import ConfigError
from . import chunks

WINDOW = 16
SHIFT = WINDOW // 2
CLIP_TIMES = chunks.DECODED_LATENTS
"""Latents of a released clip: what fixed time coordinates are divided by."""

CHOICES = {
    "time": ("local", "seven", "absolute"),
    "last": ("own", "before", "repeat"),
    "context": ("none", "clips"),
    "suffix": ("zero", "first"),
    "shift": ("odd", "off", "even"),
}


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How a 24-block decoder was trained; the first choice of each is the likeliest."""

    time: str = "local"
    """Time coordinates of a block of n latents: i of n; i of 7; the latent's number in the whole clip of 7."""
    last: str = "own"
    """The 2 latents after the last 5: by themselves, after the 3 before them, or the last repeated up to 5."""
    context: str = "none"
    """Blocks by themselves, or the released 7 latents, of which the last 5 frames blend into the next 7."""
    suffix: str = "zero"
    """Coordinates of the suffix tokens: all zero, or the time of the block's first latent."""
    shift: str = "odd"
    """Layers whose windows are shifted by half."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value not in CHOICES[option.name]:
                allowed = f"one of {list(CHOICES[option.name])}"
                raise ConfigError(option.name, value, allowed, "Run probe-decoder again.")

    def layer_shift(self, layer: int) -> int:
        shifted = {"odd": layer % 2 == 1, "off": False, "even": layer % 2 == 0}[self.shift]
        return SHIFT if shifted else 0

    def coordinates(self, span: "Span") -> tuple[torch.Tensor, float]:
        """Time coordinate of every latent of a span, fp32, and that of the suffix."""
        index = torch.arange(len(span), dtype=torch.float32)
        if self.time == "absolute":
            index += span.first
        times = 2 * (index + 0.5) / (len(span) if self.time == "local" else CLIP_TIMES) - 1
        return times, times[0].item() if self.suffix == "first" else 0.0


@dataclass(frozen=True)
class Span:
    """Latents [first, stop) that are decoded together, `repeated` copies of the last one among them."""

    first: int
    stop: int
    repeated: int = 0
    skipped: int = 0
    """Latents at the front whose frames are another span's."""

    def __len__(self) -> int:
        return self.stop - self.first + self.repeated

    def kept_frames(self) -> list[int]:
        """Decoded frames that belong to the clip: 4 a latent, of each fifth latent of the clip the last one alone."""
        kept = []
        for latent in range(self.first + self.skipped, self.stop):
            from_frame = chunks.FRAME_DROP if latent % chunks.CLIP_LATENTS == 0 else 0
            at = (latent - self.first) * chunks.FRAMES_PER_LATENT
            kept += range(at + from_frame, at + chunks.FRAMES_PER_LATENT)
        return kept


def spans(latents: int, last: str) -> Iterator[Span]:
    """Spans of a clip that is decoded in blocks of 5; `last` is WindowOptions.last."""
    size = chunks.CLIP_LATENTS
    for first in range(0, latents, size):
        stop = min(first + size, latents)
        missing = size - (stop - first)
        if missing and last == "repeat":
            yield Span(first, stop, repeated=missing)
        elif missing and last == "before" and first >= missing:
            yield Span(first - missing, stop, skipped=missing)
        else:
            yield Span(first, stop)


@dataclass(frozen=True)
class Group:
    """Windows of one shape: rows of the sequence, [W, L] each; keys have the suffix behind the window."""

    queries: torch.Tensor
    keys: torch.Tensor


def groups(grid: tuple[int, int, int], shift: int, suffix: int, device: torch.device) -> tuple[Group, ...]:
    """Every window of a (T, h, w) grid, those of one shape together. A shift makes the first window a short one."""
    T, h, w = grid
    rows = torch.arange(T * h * w, device=device).view(T, h, w)
    behind = torch.arange(T * h * w, T * h * w + suffix, device=device)
    found = []
    for tops in _axis(h, shift).values():
        for lefts in _axis(w, shift).values():
            windows = [rows[:, y, x].flatten() for y in tops for x in lefts]
            queries = torch.stack(windows)
            found.append(Group(queries, torch.cat([queries, behind.expand(len(windows), -1)], dim=1)))
    return tuple(found)


def _axis(size: int, shift: int) -> dict[int, list[slice]]:
    """Windows along an axis by their length."""
    found: dict[int, list[slice]] = {}
    for start in range(-shift, size, WINDOW):
        window = slice(max(0, start), min(size, start + WINDOW))
        found.setdefault(window.stop - window.start, []).append(window)
    return found


def window_coordinates(size: int, shift: int) -> torch.Tensor:
    """Coordinate of every index of a spatial axis inside its own window, fp32."""
    local = (torch.arange(size) + shift) % WINDOW
    return 2 * (local.float() + 0.5) / WINDOW - 1
