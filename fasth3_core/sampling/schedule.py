"""Noise schedules: one base grid, shifted once for the video and once for the audio stream.

Noise amount sigma, clean time t = 1 - sigma, x = (1 - sigma) * clean + sigma * noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Schedule:
    """One stream's grid of N points, which makes N - 1 forwards.

    `timesteps` are the clean times of the forwards, fp32(1 - sigma). Both are kept because the sampler
    recomputes sigma from the timestep for x0 and takes the stored sigma for the ratio.
    """

    sigmas: torch.Tensor
    """[N] fp32, strictly decreasing, last exactly 0."""
    timesteps: torch.Tensor
    """[N - 1] fp32."""

    @property
    def num_forwards(self) -> int:
        return self.timesteps.numel()


def uniform_base(points: int) -> torch.Tensor:
    """`points` equally spaced positions from 1 to 0, fp32 [points]."""
    if points < 2:
        raise ValueError(f"a grid needs at least 2 points (1 forward), got {points}")
    return torch.linspace(1.0, 0.0, points, dtype=torch.float32, device="cpu")


def rungs_base(rungs: Sequence[int]) -> torch.Tensor:
    """Trained rungs (positions x 1000, strictly decreasing) and the end at 0, fp64 [len(rungs) + 1].

    fp64 because training shifts the rungs in doubles and rounds once; the uniform grid is fp32 throughout.
    """
    return torch.tensor([*rungs, 0], dtype=torch.float64, device="cpu") / 1000.0


def bank_base(fine_steps: int, points: int, max_time: float) -> torch.Tensor:
    """Every n-th of fine_steps + 1 equally spaced positions from `max_time` to 0, fp64 [points]."""
    fine = torch.linspace(max_time, 0.0, fine_steps + 1, dtype=torch.float64, device="cpu")
    return fine[:: fine_steps // (points - 1)]


def shifted(base: torch.Tensor, shift: float, max_time: float = 1.0) -> Schedule:
    """sigma = s b m / (m + (s - 1) b) in the dtype of `base`, then fp32; equal neighbours collapse into one point.

    m = `max_time` is the start that the shift leaves in place: 1 but for head-bank students.
    """
    sigmas = torch.unique_consecutive((shift * base * max_time / (max_time + (shift - 1.0) * base)).float())
    return Schedule(sigmas=sigmas, timesteps=1.0 - sigmas[:-1])


def explicit(sigmas: Sequence[float] | torch.Tensor) -> Schedule:
    """A given grid, taken as it is: never shifted."""
    grid = torch.as_tensor(sigmas, dtype=torch.float32, device="cpu")
    if grid.numel() < 2 or grid[-1] != 0 or bool((grid[1:] >= grid[:-1]).any()):
        raise ValueError(
            f"sigmas {grid.tolist()}: need at least two values, strictly decreasing, and the last one exactly 0"
        )
    return Schedule(sigmas=grid, timesteps=1.0 - grid[:-1])


def step(x: torch.Tensor, velocity: torch.Tensor, schedule: Schedule, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One deterministic step in fp32: returns (x at the next point, the clean estimate x0).

    Equal to Euler in exact arithmetic; the two sigma paths (1 - timestep for x0, stored sigma for the ratio) are what
    the student was distilled with, and the last step returns exactly x0.
    """
    sigma_t = 1.0 - schedule.timesteps[index].item()
    x0 = x + sigma_t * velocity.float()
    ratio = (schedule.sigmas[index + 1] / schedule.sigmas[index]).item()
    return ratio * x + (1.0 - ratio) * x0, x0
