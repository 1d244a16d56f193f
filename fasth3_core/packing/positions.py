"""Position ids (t, h, w) of every token, in float64: what the rotary table is built from.

One unit of time is 1/40 s, the length of one audio latent; a pixel frame lasts 5/3.
"""

import math

import numpy as np
import torch

FRAME_UNITS = 5.0 / 3.0
_FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
"""Pixel frames of the latents of one 17-frame clip; the pattern restarts with every clip."""


def latent_spans(num_latents: int) -> np.ndarray:
    """Time that each video latent lasts, float64 [T]."""
    return FRAME_UNITS * np.array(_frames_of_latents(num_latents), dtype=np.float64)


def keyframe_time(origin: float, frame: int, num_latents: int) -> float:
    """Time of a pixel frame of a clip that starts at `origin`.

    The last frame is counted back from the end of the spans, summed pairwise: that is the trained rule, an ulp away
    from 5/3 per frame.
    """
    if 0 < frame == frames_in(num_latents) - 1:
        return float(origin + latent_spans(num_latents).sum() - FRAME_UNITS)
    return origin + FRAME_UNITS * frame


def frames_in(num_latents: int) -> int:
    """Pixel frames that `num_latents` latents stand for; any count, not only whole clips."""
    return sum(_frames_of_latents(num_latents))


def _frames_of_latents(num_latents: int) -> list[int]:
    return [_FRAMES_PER_LATENT[k % len(_FRAMES_PER_LATENT)] for k in range(num_latents)]


def reference_span(num_latents: int, num_audio: int) -> float:
    """Time that a video reference occupies before the target. Summed in sequence, unlike `keyframe_time`."""
    return max(float(num_audio), sum(latent_spans(num_latents).tolist()))


def text_positions(length: int) -> torch.Tensor:
    """[L, 3]: row i sits at (i, 0, 0)."""
    out = torch.zeros(length, 3, dtype=torch.float64, device="cpu")
    out[:, 0] = torch.arange(length, dtype=torch.float64, device="cpu")
    return out


def axis_grid(size: int, height: int, width: int) -> torch.Tensor:
    """Token coordinates along an axis of `size` latents in an `height` x `width` latent frame, float64 [size // 2].

    The frame is normalised to unit area and scaled by 32, so that coordinates do not depend on resolution.
    """
    ratio = size / math.sqrt(height * width)
    grid = np.linspace((1.0 - ratio) / 2.0, (1.0 + ratio) / 2.0, size // 2, endpoint=False, dtype=np.float64)
    return torch.from_numpy(grid * 32.0)


def video_positions(num_latents: int, height: int, width: int, origin: float) -> torch.Tensor:
    """[T * h/2 * w/2, 3] in raster order t, h, w; `height` and `width` in latents."""
    spans = latent_spans(num_latents)
    times = torch.from_numpy(origin + np.concatenate([[0.0], np.cumsum(spans)[:-1]]))
    grid = torch.meshgrid(times, axis_grid(height, height, width), axis_grid(width, height, width), indexing="ij")
    return torch.stack([axis.reshape(-1) for axis in grid], dim=-1)


def audio_positions(num_audio: int, height: int, width: int, origin: float) -> torch.Tensor:
    """[2A, 3], left channel first. h is 0; w is the first or the last coordinate of the frame the sound belongs to."""
    w_axis = axis_grid(width, height, width)
    out = torch.zeros(2 * num_audio, 3, dtype=torch.float64, device="cpu")
    out[:, 0] = (origin + torch.arange(num_audio, dtype=torch.float64, device="cpu")).repeat(2)
    out[:num_audio, 2] = w_axis[0]
    out[num_audio:, 2] = w_axis[-1]
    return out
