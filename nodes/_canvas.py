"""From what a user asks (an aspect, an area, seconds) to sizes that the model takes."""

import math

from ..fasth3_core.packing.geometry import CANVAS_MULTIPLE, resolve_canvas, snap_side

CUSTOM = "custom"
ASPECTS = {
    "16:9": (16, 9), "9:16": (9, 16), "1:1": (1, 1), "4:3": (4, 3), "3:4": (3, 4), "3:2": (3, 2), "2:3": (2, 3),
    "21:9": (21, 9),
}


def choose_canvas(aspect: str, megapixels: float, width: int, height: int) -> tuple[int, int]:
    """Width and height in multiples of 32.

    Args:
        aspect: a name of ASPECTS, or "custom" for the nearest legal size to width x height.
        megapixels: area in millions of pixels; 0 takes the model's own canvas (768 short edge, at most 768 x 1344).
    """
    if aspect == CUSTOM:
        return snap_side(width), snap_side(height)
    across, down = ASPECTS[aspect]
    if megapixels == 0:
        canvas_height, canvas_width = resolve_canvas(across, down)
        return canvas_width, canvas_height
    ratio, area = across / down, megapixels * 1e6
    ideal_w, ideal_h = math.sqrt(area * ratio), math.sqrt(area / ratio)

    def cost(size: tuple[int, int]) -> float:
        # area weighs double: it decides the time, while a slightly different aspect is hardly seen
        return 2 * abs(math.log(size[0] * size[1] / area)) + abs(math.log(size[0] / size[1] / ratio))

    return min(((w, h) for w in _around(ideal_w) for h in _around(ideal_h)), key=cost)


def _around(pixels: float) -> tuple[int, int]:
    below = max(CANVAS_MULTIPLE, math.floor(pixels / CANVAS_MULTIPLE) * CANVAS_MULTIPLE)
    return below, below + CANVAS_MULTIPLE
