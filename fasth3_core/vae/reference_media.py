"""What references may be and how they become pixels for the encoder, before any of them is encoded.

Pictures and frames arrive upright and RGB (media/images.py). Times are seconds from the first frame.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from ..errors import GeometryError
from ..packing.geometry import CANVAS_MULTIPLE, CLIP_FRAMES, FPS, MIN_FRAMES, resolve_canvas

MOST = {"images": 9, "videos": 3, "audios": 3}
MOST_IN_ALL = 12
SHORT_EDGE = 2048
"""Pixels of a reference picture's short side, whatever its own."""


def check_counts(images: int, videos: int, audios: int) -> None:
    """Raise GeometryError for more references than the model was trained with, or for sound alone."""
    counts = {"images": images, "videos": videos, "audios": audios}
    for kind, count in counts.items():
        if count > MOST[kind]:
            raise GeometryError(f"{count} reference {kind}: the model takes at most {MOST[kind]}. Leave some out.")
    if sum(counts.values()) > MOST_IN_ALL:
        raise GeometryError(f"{sum(counts.values())} references: the model takes at most {MOST_IN_ALL} in all.")
    if audios and not images and not videos:
        raise GeometryError("sound is the only reference: the model needs a picture or a video beside it.")


def picture_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of a reference picture for the encoder: short side 2048, each side to a multiple of 32.

    Raises GeometryError for an aspect ratio outside 1:4 to 4:1.
    """
    if not 0.25 <= width / height <= 4:
        size = f"{width} x {height} pixels"
        raise GeometryError(f"a reference picture of {size}: its aspect is outside 1:4 to 4:1. Crop it.")
    scale = SHORT_EDGE / min(height, width)
    return tuple(round(side * scale / CANVAS_MULTIPLE) * CANVAS_MULTIPLE for side in (height, width))


def video_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of a reference video's frames for the encoder: the 768p canvas of its own aspect."""
    return resolve_canvas(width, height)


def resample(times: Sequence[float], end: float, most: int) -> list[int]:
    """Which source frame each frame at 24 a second shows, by nearest time; any rate, constant or not.

    Source frame i fills the slots from its own time to the next one's (the last to `end`), so that a slow source
    repeats frames and a fast one loses some.

    Args:
        times: ascending, the first one 0.
        end: of the last frame, in seconds: n / rate for a constant rate.
        most: frames kept: those of the video to make.

    Raises GeometryError for times that do not ascend, or nothing to show.
    """
    bounds = [*times, end]
    if len(times) == 0 or not all(a < b for a, b in pairwise(bounds)) or not math.isfinite(end):
        raise GeometryError(f"{len(times)} reference frames whose times do not ascend to the end at {end:g} s.")
    slots = [math.floor(time * FPS + 0.5) for time in bounds]
    shown = [i for i, (a, b) in enumerate(pairwise(slots)) for _ in range(b - a)]
    if not shown:
        raise GeometryError(f"a reference video of {end:g} s: shorter than half a frame at {FPS} a second.")
    return shown[:most]


def constant_times(frames: int, rate: float) -> tuple[list[float], float]:
    """Times and end of `frames` at a constant `rate`, as `resample` takes them."""
    if not 0 < rate < math.inf:
        raise GeometryError(f"a reference video at {rate} frames a second: expected a positive number.")
    return [i / rate for i in range(frames)], frames / rate


def encoded_frames(frames: int) -> int:
    """Frames of a reference video that are encoded: 17k + 5, at least 22, which shorter ones are filled up to."""
    return max(1, (frames - MIN_FRAMES) // CLIP_FRAMES) * CLIP_FRAMES + MIN_FRAMES
