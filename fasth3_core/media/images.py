"""Pictures from files to the model's canvas, as FastVideo prepares keyframes: upright, RGB, LANCZOS."""

import os

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import FastH3Error, GeometryError


def load_rgb(path: str | os.PathLike) -> Image.Image:
    """Open a picture, turn it upright by its EXIF orientation, and drop everything but RGB.

    Raises:
        FastH3Error: the file is no picture, is cut short, or claims more pixels than anybody has.
    """
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip to 8
                upright = Image.fromarray((np.asarray(upright) / 257).round().clip(0, 255).astype(np.uint8))
            return upright.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise FastH3Error(f"{os.fspath(path)!r} cannot be read as a picture: {error}") from error


def stretch(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resize to the canvas without keeping the aspect: what the first keyframe gets."""
    _check_canvas(height, width)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def cover_crop(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resize until the canvas is covered, then cut out its centre: what every later keyframe gets."""
    _check_canvas(height, width)
    scale = max(width / image.width, height / image.height)
    cover_w = max(width, round(image.width * scale))
    cover_h = max(height, round(image.height * scale))
    left, top = (cover_w - width) // 2, (cover_h - height) // 2
    resized = image.resize((cover_w, cover_h), Image.Resampling.LANCZOS)
    return resized.crop((left, top, left + width, top + height))


def to_tensor(image: Image.Image) -> torch.Tensor:
    """RGB picture -> [H, W, 3] fp32 in [0, 1]."""
    return torch.from_numpy(np.array(image.convert("RGB"))).float() / 255


def opaque(pixels_HWC: torch.Tensor, background: float | None) -> torch.Tensor:
    """[H, W, 3 or 4] in [0, 1] -> [H, W, 3]. Behind what is transparent: a grey, or where None its hidden colours."""
    if pixels_HWC.shape[-1] == 3 or background is None:
        return pixels_HWC[..., :3]
    opacity = pixels_HWC[..., 3:].clamp(0, 1)
    return pixels_HWC[..., :3] * opacity + background * (1 - opacity)


def to_image(pixels_HWC: torch.Tensor) -> Image.Image:
    """[H, W, 3] in [0, 1] -> RGB picture, rounded to nearest."""
    return Image.fromarray(pixels_HWC.detach().float().clamp(0, 1).mul(255).round().to(torch.uint8).cpu().numpy())


def _check_canvas(height: int, width: int) -> None:
    if height <= 0 or width <= 0:
        raise GeometryError(f"a canvas of {width}x{height} pixels has no area.")
