"""Pixels to raw latents, clip by clip and tile by tile: 17 frames at a time on the encoder's device."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...kernels.precision import exact_fp32
from ..errors import GeometryError
from . import chunks, latents
from .run import Progress, Run, nothing
from .tiling import STEP, Axis, Stitcher, axis_tiles
from .video_encoder import LOGVAR_RANGE, VideoEncoder


def encode_moments(
    encoder: VideoEncoder,
    pixels: torch.Tensor,
    device: torch.device,
    on_chunk: Progress | None,
    check_interrupt: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log variance of pixels [1, 3, F, H, W], as VideoVAE.encode_moments()."""
    if pixels.ndim != 5 or pixels.shape[:2] != (1, 3) or not pixels.shape[2]:
        raise GeometryError(f"pixels of shape {list(pixels.shape)}: expected [1, 3, F >= 1, H, W]")
    if min(pixels.shape[3:]) < 2 * STEP:
        raise GeometryError(f"pixels of shape {list(pixels.shape)}: a side has at least {2 * STEP} to be encoded")
    frames = pixels.shape[2]
    rows, columns = (axis_tiles(side) for side in pixels.shape[3:])
    clips = chunks.encode_clips(frames) if frames > 1 else 1
    run = Run(1, device, on_chunk or nothing, check_interrupt, clips * len(rows.starts) * len(columns.starts))
    parts = []
    for clip in range(clips):
        first = clip * chunks.CLIP_FRAMES
        part = pixels.detach()[:, :, first : first + chunks.CLIP_FRAMES].to(device)
        part = part.float() / 255 if part.dtype == torch.uint8 else part.float()
        if frames > 1:
            part = F.pad(part, (0, 0, 0, 0, 0, chunks.CLIP_FRAMES - part.shape[2]), mode="replicate")
        parts.append(_encode_clip(encoder, latents.from_pixels(part), rows, columns, run))
    moments = torch.cat(parts, dim=1)[None]
    if frames > 1:
        moments = moments[:, :, : -chunks.TOKEN_DROP]
    mean, logvar = moments.to(pixels.device).chunk(2, dim=1)
    return mean, logvar.clamp(*LOGVAR_RANGE)


def _encode_clip(encoder: VideoEncoder, clip: torch.Tensor, rows: Axis, columns: Axis, run: Run) -> torch.Tensor:
    """Moments [48, t, h, w] of one clip [1, 3, T, H, W]."""
    t = chunks.CLIP_LATENTS if clip.shape[2] > 1 else 1
    shape = (2 * encoder.latent_channels, t, rows.length // STEP, columns.length // STEP)
    canvas = torch.empty(shape, dtype=torch.float32, device=clip.device)
    stitcher = Stitcher(rows.in_latents(), columns.in_latents(), canvas)
    for r in range(len(rows.starts)):
        for c in range(len(columns.starts)):
            run.check_interrupt()
            with exact_fp32(clip.device):
                tile = encoder(clip[..., rows.tile(r), columns.tile(c)])
            stitcher.place(r, c, tile[0])
            run.advance(1)
    return stitcher.canvas
