"""Mirrors kernels/tile_topk/: an exact contract, so everything is compared exactly."""

from functools import partial

import pytest
import torch
from comfyui_fasth3.kernels.registry import names
from comfyui_fasth3.kernels.tile_topk import tile_topk, tile_topk_threshold

TORCH = [name for name in names("tile_topk") if name != "triton"]  # which has test_tile_topk_triton.py
FUNCTIONS = {name: partial(tile_topk, backend=name) for name in TORCH} | {"threshold": tile_topk_threshold}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def by_definition(scores, num_prefix, kept, mode):
    """Python's sort of (-score, tile), row by row."""
    rows = []
    for row in scores.flatten(0, 1).tolist():
        columns = range(num_prefix, len(row)) if mode == "exempt" else range(len(row))
        room = kept if mode == "exempt" else kept + num_prefix
        best = sorted(columns, key=lambda n: (-row[n], n))[:room]
        rows.append(sorted([*(range(num_prefix) if mode == "exempt" else ()), *best]))
    return torch.tensor(rows, dtype=torch.int32).view(*scores.shape[:2], -1)


@each_function
@pytest.mark.parametrize("mode", ["exempt", "compete"])
@pytest.mark.parametrize(("P", "V", "kept"), [(5, 40, 4), (0, 7, 7), (3, 1, 1), (11, 66, 7), (2, 33, 1)])
@pytest.mark.parametrize("levels", [2, 5, 10**6], ids=lambda n: f"{n}-levels")
def test_matches_the_definition_with_ties(levels, P, V, kept, mode, function):
    scores = torch.randint(-levels, levels, (3, V, P + V)) / 8
    index, count = function(scores, P, kept, mode)
    assert index.dtype == count.dtype == torch.int32
    assert torch.equal(index, by_definition(scores, P, kept, mode))
    assert torch.equal(count, torch.full((3, V), P + kept, dtype=torch.int32))


@each_function
def test_equal_scores_keep_the_lower_tiles(function):
    scores = torch.zeros(1, 600, 604)
    scores[..., 1::2] = -0.0  # equal to 0.0
    index, _ = function(scores, 4, 9, "exempt")
    assert torch.equal(index, torch.arange(13, dtype=torch.int32).expand(1, 600, 13))


@each_function
def test_not_a_number_still_gives_whole_lists(function):
    scores = torch.randn(1, 8, 10)
    scores[0, 3, 7] = float("nan")
    scores[0, 4] = float("nan")
    index, _ = function(scores, 2, 3, "exempt")
    assert 7 in index[0, 3] and index[0, 4].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept": 0}, "kept=0, expected 1 to 6"),
        ({"kept": 7}, "kept=7, expected 1 to 6"),
        ({"mode": "dense"}, "mode='dense'"),
        ({"num_prefix": 3}, "scores have 8 columns, expected 3 prefix [+] 6 video tiles"),
    ],
)
def test_wrong_arguments_name_the_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        tile_topk(torch.zeros(1, 6, 8), **({"num_prefix": 2, "kept": 1, "mode": "exempt"} | change))
