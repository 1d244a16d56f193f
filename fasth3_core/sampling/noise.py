"""Starting noise and condition noise, in the order in which the student's reference draws them.

One CPU generator seeded with the request's seed draws, in fp32: one tensor per visual condition, in packed order and
latent-shaped; the target video noise, latent-shaped; the target audio noise, as rows [2A, C].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..packing.rows import pack_audio, patchify

VISUAL_CONDITION_TIME = 0.999
"""Clean time of visual conditions: 0.999 of the latent and 0.001 of noise. Sound conditions are not noised."""

CONDITION_NOISE = ("fastvideo", "comfy", "none")


@dataclass(frozen=True)
class Condition:
    """A condition segment's clean latent: video [1, C, t, h, w], or audio [1, C, 2, a]."""

    latent: torch.Tensor
    visual: bool


@dataclass(frozen=True)
class Drawn:
    video: torch.Tensor
    """[1, C, T, H, W]"""
    audio_rows: torch.Tensor
    """[2A, C]"""
    condition_rows: tuple[torch.Tensor, ...]
    """One tensor of rows for each condition."""
    condition_time: float


def draw(
    seed: int,
    video_shape: tuple[int, ...],
    audio_rows_shape: tuple[int, int],
    conditions: Sequence[Condition],
    condition_noise: str,
) -> Drawn:
    """Draw all noise of a request.

    Args:
        condition_noise: "fastvideo" (one sequential generator, as distilled), "comfy" (row-shaped, the seed restarted
            for every condition, as ComfyUI's own sampler does) or "none" (clean conditions at time 1).

    Raises:
        ConfigError: another condition_noise.
    """
    if condition_noise not in CONDITION_NOISE:
        raise ConfigError("condition_noise", condition_noise, f"one of {list(CONDITION_NOISE)}", "Use 'fastvideo'.")
    generator = torch.Generator("cpu").manual_seed(seed)
    mixed = []
    for condition in conditions:
        latent = condition.latent.detach().to("cpu", torch.float32)
        if not condition.visual:
            mixed.append(pack_audio(latent))
        elif condition_noise == "none":
            mixed.append(patchify(latent))
        elif condition_noise == "comfy":
            rows = patchify(latent)
            restarted = torch.Generator("cpu").manual_seed(seed)
            mixed.append(_mix(rows, _randn(rows.shape, restarted)))
        else:
            mixed.append(patchify(_mix(latent, _randn(latent.shape, generator))))
    return Drawn(
        video=_randn(video_shape, generator),
        audio_rows=_randn(audio_rows_shape, generator),
        condition_rows=tuple(mixed),
        condition_time=1.0 if condition_noise == "none" else VISUAL_CONDITION_TIME,
    )


def _randn(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    # dtype and device said: a process may have other defaults, and another dtype draws other numbers
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _mix(clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    t = torch.tensor(VISUAL_CONDITION_TIME, dtype=torch.float32, device="cpu")
    return t * clean + (1.0 - t) * noise
