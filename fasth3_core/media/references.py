"""What references may be, and which sizes and frames of them are encoded: decided before any of it is.

Limits and the sizes "trained": FastVideo's Ref2VA; the others: ComfyUI's node. Pictures and frames arrive upright.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Generic, TypeVar

from ..errors import ConfigError, GeometryError
from ..packing.geometry import CLIP_FRAMES, FPS, MIN_FRAMES, resolve_canvas, snap_side

T = TypeVar("T")

MOST = {"picture": 9, "video": 3, "sound": 3}
MOST_IN_ALL = 12
SHORT_EDGE = 2048
"""Pixels of a reference picture's short side, whatever its own."""
SEEN_PER_SECOND = 2
"""Frames of a reference video that the text encoder sees."""
SIZES = ("trained", "not enlarged", "as the video")


def check_counts(counts: Mapping[str, int]) -> None:
    """Raise GeometryError for more references than the model was trained with, or for sound alone.

    Args:
        counts: how many of each of the kinds of `MOST`.
    """
    for kind, most in MOST.items():
        if counts[kind] > most:
            raise GeometryError(f"{counts[kind]} {kind} references: the model takes at most {most}. Leave some out.")
    total = sum(counts.values())
    if total > MOST_IN_ALL:
        raise GeometryError(f"{total} references: the model takes at most {MOST_IN_ALL} in all. Leave some out.")
    if total and total == counts["sound"]:
        raise GeometryError("sound is the only reference: the model needs a picture or a video beside it.")


def picture_size(height: int, width: int, rule: str, canvas: tuple[int, int]) -> tuple[int, int]:
    """Height and width at which a reference picture is encoded, multiples of 32.

    Args:
        rule: "trained" brings the short side to 2048; "not enlarged" the same, but never up; "as the video" goes down
            to the area of `canvas`, if it is larger.
        canvas: height and width of the video to make.

    Raises GeometryError for an aspect outside 1:4 to 4:1, ConfigError for another rule.
    """
    _check_aspect("picture", height, width)
    if rule not in SIZES:
        raise ConfigError("size", rule, f"one of {list(SIZES)}", "Use 'trained' if unsure.")
    scale = SHORT_EDGE / min(height, width)
    if rule == "as the video":
        scale = math.sqrt(canvas[0] * canvas[1] / (height * width))
    if rule != "trained":
        scale = min(1.0, scale)
    return snap_side(height * scale), snap_side(width * scale)


def video_size(height: int, width: int, rule: str) -> tuple[int, int]:
    """Height and width at which a reference video is encoded: the 768p canvas of its own aspect; by the rules other
    than "trained" its own size, if that is smaller. Raises GeometryError for an aspect outside 1:4 to 4:1."""
    _check_aspect("video", height, width)
    canvas = resolve_canvas(width, height)
    smaller = height * width < canvas[0] * canvas[1]
    return (snap_side(height), snap_side(width)) if smaller and rule != "trained" else canvas


def _check_aspect(what: str, height: int, width: int) -> None:
    if not (height and width and 0.25 <= width / height <= 4):
        size = f"{width} x {height} pixels"
        raise GeometryError(f"a reference {what} of {size}: its aspect is outside 1:4 to 4:1. Crop it.")


@dataclass(frozen=True)
class Timed(Generic[T]):
    """Something that is shown from `start` to `stop`, in seconds."""

    start: float
    stop: float
    item: T


def at_24_fps(timed: Iterable[Timed[T]], most: int) -> Iterator[T]:
    """What each frame at 24 a second shows, by nearest time, for any rate, constant or not: at most `most` frames.

    Each one fills the frames from its own start to the next one's (the last to its own stop), so that a slow source
    repeats frames and a fast one loses some. Reads no further than it needs. One that does not start after those before
    it is not shown.
    """
    shown, origin, last = 0, 0.0, None
    for current in timed:
        if last is None:
            origin = current.start
        elif current.start <= last.start:
            continue
        else:
            until = min(most, _frame_at(current.start - origin))
            yield from repeat(last.item, until - shown)
            shown = max(shown, until)
            if shown == most:
                return
        last = current
    if last is not None:
        yield from repeat(last.item, min(most, _frame_at(last.stop - origin)) - shown)


def _frame_at(seconds: float) -> int:
    return math.floor(seconds * FPS + 0.5)


def check_frames(frames: int) -> None:
    """Raise GeometryError for a reference video of less than five frames at 24 a second."""
    if frames < MIN_FRAMES:
        raise GeometryError(
            f"a reference video of {frames} frames at {FPS} a second: the model needs at least {MIN_FRAMES}. "
            "Use one of its frames as a picture."
        )


def encoded_frames(frames: int) -> int:
    """How many frames of a reference video at 24 a second are encoded, from the first: 17k + 5, or all below 22."""
    return min(frames, max(1, (frames - MIN_FRAMES) // CLIP_FRAMES) * CLIP_FRAMES + MIN_FRAMES)
