"""Mirrors fasth3_core/sampling/schedule.py."""

import json

import pytest
import torch
from comfyui_fasth3.fasth3_core.contracts import CONTRACTS
from comfyui_fasth3.fasth3_core.sampling import schedule

RUNGS = {"preview4": CONTRACTS["preview-4"].rungs, "v2_8": CONTRACTS["v2-8"].rungs}


def test_grids_equal_the_recorded_ones_exactly(golden_dir):
    recorded = json.loads((golden_dir / "sigmas.json").read_text())
    for name, values in recorded.items():
        shift, grid = name.removeprefix("shift").split("_", 1)
        is_rungs = grid.startswith("rungs_")
        base = schedule.rungs_base(RUNGS[grid[6:]]) if is_rungs else schedule.uniform_base(int(grid[1:]))
        assert schedule.shifted(base, float(shift)).sigmas.tolist() == values, name


def test_four_forwards_for_five_points():
    video = schedule.shifted(schedule.uniform_base(5), 12.0)
    assert video.num_forwards == 4
    assert torch.equal(video.timesteps, 1 - video.sigmas[:-1])


@pytest.mark.parametrize("shift", [3.0, 10.0, 12.0])
def test_a_linear_flow_is_recovered_in_four_steps(shift):
    """x(sigma) = (1 - sigma) clean + sigma noise has the constant velocity clean - noise."""
    clean, noise = torch.randn(2, 100)
    grid = schedule.shifted(schedule.uniform_base(5), shift)
    x = noise
    for i in range(grid.num_forwards):
        x, x0 = schedule.step(x, clean - noise, grid, i)
        torch.testing.assert_close(x0, clean, rtol=0, atol=2e-6)
    assert torch.equal(x, x0)  # the last step returns x0 itself


def test_step_is_euler():
    grid = schedule.shifted(schedule.uniform_base(5), 12.0)
    x, v = torch.randn(2, 50)
    for i in range(4):
        euler = x + (grid.sigmas[i] - grid.sigmas[i + 1]) * v
        torch.testing.assert_close(schedule.step(x, v, grid, i)[0], euler, rtol=0, atol=1e-6)


def test_explicit_grids_are_not_shifted_and_are_checked():
    assert schedule.explicit([1, 0.5, 0.125, 0]).sigmas.tolist() == [1, 0.5, 0.125, 0]
    for bad in ([0.0], [1, 0.5], [1, 0.5, 0.5, 0], [0.5, 1, 0]):
        with pytest.raises(ValueError, match="strictly decreasing"):
            schedule.explicit(bad)
    with pytest.raises(ValueError, match="at least 2 points"):
        schedule.uniform_base(1)
