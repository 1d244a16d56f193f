"""Pictures of an unfinished video: of a latent, by a linear map to RGB, and of finished frames. Several moments side by
side, because the first frame alone says nothing of the motion. Costs next to nothing and shows no detail."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from PIL import Image

from .images import to_image
from .rgb_map import BUILT_IN, RGBMap

MAX_SIDE = 512
"""Longest side of a preview in pixels."""
MOMENTS = 4
"""Frames on a strip, evenly spaced, the first and the last among them."""
_LATENT_PIXELS = 16
"""One latent pixel becomes up to this many picture pixels, never more, so that small canvases are not blown up."""


def moments(count: int, wanted: int = MOMENTS) -> list[int]:
    """Which of `count` frames a strip shows."""
    shown = min(count, wanted)
    return [round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)]


def latent_preview(video_latent: torch.Tensor, rgb_map: RGBMap = BUILT_IN) -> Image.Image:
    """Strip of a normalised video latent [1, 24, T, h, w], at most MAX_SIDE pixels long."""
    chosen = moments(video_latent.shape[2])
    frames_CTHW = video_latent[0].detach()[:, chosen].float().cpu()
    rgb_THWC = rgb_map.apply(frames_CTHW.movedim(0, -1))
    return strip([to_image(rgb_HWC) for rgb_HWC in rgb_THWC], largest_scale=_LATENT_PIXELS)


def frames_preview(frames_FHWC: torch.Tensor) -> Image.Image:
    """Strip of finished frames [F, H, W, 3], uint8 or uint16 on the CPU."""
    small = []
    for index in moments(len(frames_FHWC)):
        frame = frames_FHWC[index]
        # every second pixel is enough for a picture an eighth as large, and a quarter of the work
        step = max(1, max(frame.shape[:2]) // MAX_SIDE)
        frame = frame[::step, ::step]
        whole = frame if frame.dtype == torch.uint8 else (frame.to(torch.int32) >> 8).to(torch.uint8)
        small.append(Image.fromarray(whole.contiguous().numpy()))
    return strip(small)


def draft_preview(video_latent: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor]) -> Image.Image:
    """Strip that a small decoder makes of a normalised video latent [1, 24, T, h, w].

    decode([1, 24, 1, h, w]) -> [1, 3, 1, 16h, 16w]. It gets moments one by one, and no larger than they are shown: at
    full size its buffers would be half a gigabyte, beside a transformer that may have left no more.
    """
    side = MAX_SIDE // 2 // _LATENT_PIXELS
    scale = min(1.0, side / max(video_latent.shape[3:]))
    size = [max(1, round(scale * length)) for length in video_latent.shape[3:]]
    pictures = []
    for index in moments(video_latent.shape[2]):
        small = F.interpolate(video_latent[0, :, index : index + 1].detach().float().movedim(1, 0), size, mode="area")
        pictures.append(to_image(decode(small.movedim(0, 1)[None])[0, :, 0].movedim(0, -1)))
    return strip(pictures)


def strip(pictures: Sequence[Image.Image], largest_scale: float = 1.0) -> Image.Image:
    """Pictures of one size in reading order, on as many lines as makes them largest within MAX_SIDE."""
    width, height = pictures[0].size
    count = len(pictures)

    def scale(columns: int) -> float:
        lines = -(-count // columns)
        return min(largest_scale, MAX_SIDE / (columns * width), MAX_SIDE / (lines * height))

    def squareness(columns: int) -> int:
        return -max(columns * width, count // columns * height)

    columns = max((n for n in range(1, count + 1) if count % n == 0), key=lambda n: (scale(n), squareness(n)))
    cell = max(1, int(width * scale(columns))), max(1, int(height * scale(columns)))
    sheet = Image.new("RGB", (columns * cell[0], count // columns * cell[1]))
    for number, picture in enumerate(pictures):
        line, column = divmod(number, columns)
        sheet.paste(picture.resize(cell, Image.Resampling.BILINEAR), (column * cell[0], line * cell[1]))
    return sheet
