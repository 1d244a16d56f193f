"""References as the video VAE's encoder takes them: bytes [1, 3, F, H, W], each prepared when its turn comes."""

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from ..errors import ConfigError
from ..packing.geometry import FPS
from .film import Film
from .images import opaque, stretch, to_image
from .references import SEEN_PER_SECOND, at_24_fps, check_frames, encoded_frames, picture_size, video_size


def check_image(image_BHWC: torch.Tensor, where: str) -> None:
    """Raises ConfigError, which names `where`, unless it is [B, H, W, 3 or 4] with pixels in it, all finite."""
    if image_BHWC.ndim != 4 or image_BHWC.shape[-1] not in (3, 4) or not all(image_BHWC.shape):
        shape = f"an IMAGE of shape {list(image_BHWC.shape)}"
        raise ConfigError(where, shape, "[1, height, width, 3 or 4]", "Load a picture.")
    if not bool(image_BHWC.isfinite().all()):
        raise ConfigError(where, "an IMAGE with NaN or infinity in it", "numbers", "Decode it in bf16 or fp32.")


def to_clip(picture: Image.Image) -> torch.Tensor:
    """One RGB picture as a clip [1, 3, 1, H, W]."""
    return _bytes(picture).permute(2, 0, 1)[None, :, None]


def picture_pixels(
    image_HWC: torch.Tensor, rule: str, canvas: tuple[int, int], background: float | None
) -> torch.Tensor:
    """One picture [H, W, 3 or 4] in [0, 1] at `picture_size`, as [1, 3, 1, h, w]."""
    height, width = picture_size(*image_HWC.shape[:2], rule, canvas)
    return to_clip(stretch(to_image(opaque(image_HWC.float().cpu(), background)), height, width))


def film_pixels(film: Film, rule: str, most: int, check_interrupt: Callable[[], None]) -> torch.Tensor:
    """The frames of a film at 24 a second, at most `most`, at `video_size`, as [1, 3, n, h, w].

    Raises GeometryError for a film that is too short.
    """
    height, width = video_size(film.height, film.width, rule)
    out_FHWC = torch.empty(most, height, width, 3, dtype=torch.uint8, device="cpu")
    filled, last = 0, None
    for make in at_24_fps(film.frames(), most):
        check_interrupt()
        out_FHWC[filled] = out_FHWC[filled - 1] if make is last else _bytes(stretch(make(), height, width))
        filled, last = filled + 1, make
    check_frames(filled)
    return out_FHWC[:filled].permute(3, 0, 1, 2)[None]


def encoded(clip: torch.Tensor) -> torch.Tensor:
    """What the VAE encodes of a picture or a film [1, 3, F, H, W]."""
    frames = clip.shape[2]
    return clip if frames == 1 else clip[:, :, : encoded_frames(frames)]


def seen(clip: torch.Tensor) -> torch.Tensor:
    """What the text encoder sees of it, a picture or two frames a second, as [n, H, W, 3]."""
    return clip[0, :, :: FPS // SEEN_PER_SECOND].permute(1, 2, 3, 0)


def _bytes(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture))
