"""Finds the options of a whole-frame decoder by comparing its pictures with those of the released decoder."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .video import VideoVAE
from .windows import CHOICES, WindowOptions

LEAST_DB = 35.0
"""A right guess is published at 38 to 45 dB; what stays below this is another decoder, such as the causal one."""

SAME_DB = 90.0
"""From here on two pictures are the same."""
NOISE_DB = 0.01


@dataclass(frozen=True)
class Tried:
    options: WindowOptions
    psnr_db: float
    worst_frame_db: float


def probe(
    student: VideoVAE,
    teacher: VideoVAE,
    latent: torch.Tensor,
    told: Callable[[Tried], None] = lambda tried: None,
) -> list[Tried]:
    """Every combination that was tried, the best first.

    One option at a time from the likeliest combination on, until no single change is better: 10 to 20 decodes. What
    does not change the picture of this latent keeps its likeliest choice.

    Args:
        student: with `windows` of any kind; teacher: decodes by the released plan.
        latent: normalised [1, 24, T, h, w] of a real clip. 7 latents and 32 x 32 of them tell everything apart: shifted
            windows, and 2 latents after the last 5.
    """
    truth = teacher.decode(latent)
    tried: dict[WindowOptions, Tried] = {}

    def score(options: WindowOptions) -> float:
        if options not in tried:
            pixels = replace(student, windows=options).decode(latent)
            errors = (pixels - truth).double().square().mean(dim=(0, 1, 3, 4)).clamp_min(1e-20)
            psnr, worst = (-10 * error.log10().item() for error in (errors.mean(), errors.max()))
            tried[options] = Tried(options, psnr, worst)
            told(tried[options])
        return min(tried[options].psnr_db, SAME_DB)

    likeliest = WindowOptions()
    best, improved = likeliest, True
    while improved:
        improved = False
        for name, choices in CHOICES.items():
            for choice in choices:
                other = replace(best, **{name: choice})
                if score(other) > score(best) + NOISE_DB:
                    best, improved = other, True
    for name in CHOICES:
        other = replace(best, **{name: getattr(likeliest, name)})
        if score(other) >= score(best) - NOISE_DB:
            best = other
    return sorted(tried.values(), key=lambda each: (each.options != best, -each.psnr_db))
