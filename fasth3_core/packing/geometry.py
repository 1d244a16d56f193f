"""Legal sizes: frames 17k + 5, pixels in multiples of 32, and the latent grids they make.

24 frames and 40 audio latents a second. Only `snap_*` and `resolve_canvas` change a request; `check_*` refuse it and
name the nearest legal values.
"""

import math

from ..errors import GeometryError

FPS = 24
AUDIO_LATENTS_PER_SECOND = 40
SAMPLE_RATE = 32_000
CANVAS_MULTIPLE = 32
"""Pixels: 16 per latent times 2 latents per token."""
LATENT_PIXELS = 16
MIN_FRAMES = 5
CLIP_FRAMES = 17
CLIP_LATENTS = 5
TRAINED_FRAMES = (124, 362)
"""Shortest and longest clip of the training range; others run with a warning."""

_SHORT_EDGE = 768
_MAX_PIXELS = 768 * 1344


def check_frames(frames: int) -> None:
    """Raise GeometryError unless `frames` is 17k + 5 and at least 5."""
    if frames < MIN_FRAMES or frames % CLIP_FRAMES != MIN_FRAMES:
        below = max(MIN_FRAMES, (frames - MIN_FRAMES) // CLIP_FRAMES * CLIP_FRAMES + MIN_FRAMES)
        raise GeometryError(
            f"{frames} frames: the model takes 17k + 5. Nearest: {below} or {below + CLIP_FRAMES}."
        )


def check_size(width: int, height: int) -> None:
    """Raise GeometryError unless both sides, in pixels, are positive multiples of 32."""
    for name, side in (("width", width), ("height", height)):
        if side < CANVAS_MULTIPLE or side % CANVAS_MULTIPLE:
            below = max(CANVAS_MULTIPLE, side // CANVAS_MULTIPLE * CANVAS_MULTIPLE)
            raise GeometryError(
                f"{name} {side}: must be a multiple of {CANVAS_MULTIPLE} pixels. "
                f"Nearest: {below} or {below + CANVAS_MULTIPLE}."
            )


def latent_frames(frames: int) -> int:
    """Video latent frames T of a legal frame count: 5k + 2."""
    check_frames(frames)
    return CLIP_LATENTS * ((frames - MIN_FRAMES) // CLIP_FRAMES) + 2


def frames_of_latents(num_latents: int) -> int:
    """Pixel frames of T = 5k + 2 video latents; raises GeometryError for any other T."""
    if num_latents < 2 or num_latents % CLIP_LATENTS != 2:
        below = max(2, (num_latents - 2) // CLIP_LATENTS * CLIP_LATENTS + 2)
        raise GeometryError(
            f"{num_latents} latent frames: a clip has 5k + 2 (17k + 5 frames). "
            f"Nearest: {below} or {below + CLIP_LATENTS}."
        )
    return CLIP_FRAMES * ((num_latents - 2) // CLIP_LATENTS) + MIN_FRAMES


def audio_latents(frames: int) -> int:
    """Audio latents per stereo channel of a clip; Python's rounding (half to even) is part of the definition."""
    return round(frames / FPS * AUDIO_LATENTS_PER_SECOND)


def audio_samples(frames: int) -> int:
    """Samples per channel that last exactly as long as `frames`."""
    return round(frames / FPS * SAMPLE_RATE)


def snap_frames(seconds: float) -> int:
    """The shortest legal frame count that lasts at least `seconds`: 5 s makes 124, 15 s makes 362.

    Raises:
        GeometryError: no length, such as NaN or a negative number.
    """
    if not 0 <= seconds < math.inf:  # also refuses NaN
        raise GeometryError(f"seconds={seconds}: expected 0 or more, such as 5.")
    wanted = max(MIN_FRAMES, math.ceil(seconds * FPS - 1e-6))
    return wanted + (MIN_FRAMES - wanted) % CLIP_FRAMES


def snap_side(pixels: float) -> int:
    """The nearest multiple of 32, at least 32."""
    return max(CANVAS_MULTIPLE, round(pixels / CANVAS_MULTIPLE) * CANVAS_MULTIPLE)


def resolve_canvas(aspect_width: float, aspect_height: float) -> tuple[int, int]:
    """Height and width in pixels of the 768p canvas with this aspect ratio, which must lie in 1:4 … 4:1."""
    ratio = aspect_width / aspect_height
    if not 0.25 <= ratio <= 4.0:
        raise GeometryError(f"aspect {aspect_width}:{aspect_height} is outside 1:4 to 4:1.")
    width, height = (_SHORT_EDGE * ratio, _SHORT_EDGE) if ratio >= 1 else (_SHORT_EDGE, _SHORT_EDGE / ratio)
    if width * height > _MAX_PIXELS:
        scale = math.sqrt(_MAX_PIXELS / (width * height))
        width, height = width * scale, height * scale
    return snap_side(height), snap_side(width)
