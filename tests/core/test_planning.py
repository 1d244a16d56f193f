"""Mirrors fasth3_core/planning.py."""

from dataclasses import replace

import pytest
from comfyui_fasth3.fasth3_core.config import DiTConfig, VSAConfig
from comfyui_fasth3.fasth3_core.contracts import CONTRACTS
from comfyui_fasth3.fasth3_core.errors import ConfigError, GeometryError
from comfyui_fasth3.fasth3_core.planning import Wanted, plan
from comfyui_fasth3.fasth3_core.planning_fit import PASSES, alternatives, fit
from comfyui_fasth3.fasth3_core.planning_sizes import (
    num_block_parameters,
    num_parameters,
    released,
    released_sizes,
    resident_parameters,
)
from comfyui_fasth3.fasth3_core.weights.placement import GIB, RESIDENT, Offload, Placement, Room, Sizes

from .tiny import tiny_tensors

VSA = VSAConfig(keep_rule="sparsity", sparsity=0.9, tile_size=64)


GATED, DENSE = released(CONTRACTS["preview-4"]), released(CONTRACTS["base"])


def wanted(**changes):
    config = changes.get("config", GATED)
    request = dict(width=1344, height=768, frames=124, text_tokens=300, forwards=4, config=config, vsa=VSA,
                   sizes=released_sizes(config, 2), element_size=2)  # fmt: skip
    return Wanted(**(request | changes))


def planned(placement=RESIDENT, **changes):
    return plan(wanted(**changes), placement)


def test_parameters_of_the_release():
    assert num_parameters(DENSE) == 33_122_992_896
    assert num_parameters(GATED) - num_parameters(DENSE) == 1_926_758_400


@pytest.mark.parametrize("gates", [True, False])
def test_parameters_of_any_transformer(gates):
    tensors = tiny_tensors(gates=gates, num_layers=3)
    config = DiTConfig.from_shapes({name: tuple(t.shape) for name, t in tensors.items()})
    assert num_parameters(config) == sum(t.numel() for name, t in tensors.items() if name != "rope.inv_freq")


def test_adaln_of_the_blocks_is_not_resident():
    config = GATED
    assert num_parameters(config) - resident_parameters(config) == 50 * 260_209_152


def test_tokens_and_tiles_of_the_trained_canvas():
    result = planned()
    assert (result.tokens, result.video_tokens, result.audio_tokens) == (38_010, 37_296, 414)
    assert (result.prefix_tiles, result.video_tiles, result.kept_tiles) == (12, 660, 66)
    assert result.sparse_steps == 4 and result.tile_fill == pytest.approx(37_296 / (660 * 64))
    assert "38,010 tokens" in result.to_text() and "keeps 66 of 660" in result.to_text()


def test_dense_and_partly_dense_runs():
    dense = planned(vsa=None)
    assert (dense.tile_size, dense.sparse_steps) == (None, 0) and "dense attention in all 4" in dense.to_text()
    partly = planned(vsa=VSAConfig(keep_rule="sparsity", sparsity=0.9, tile_size=64, dense_first_steps=1))
    assert partly.sparse_steps == 3 and partly.kept_tiles == 66


def test_activations_grow_with_the_sequence_and_not_with_the_weights():
    short, long = planned(frames=124), planned(frames=362)
    assert 2.5 < long.run.attention / short.run.attention < 3.0
    assert planned(sizes=Sizes(top=1, blocks=(1,) * 50)).run == short.run
    assert planned(width=704, height=416).run.working < short.run.working < planned(condition_tokens=2000).run.working
    assert short.run.peak < short.run.working < 1.3 * short.run.peak


def test_released_models_have_their_own_blocks():
    for name, layers, adaln, heads in (
        ("preview-4", 50, "full", 1), ("trim-8", 42, "rank", 1),
        ("compact", 42, "full", 1), ("omniref-8", 50, "full", 32),
    ):
        config = released(CONTRACTS[name])
        assert (config.num_layers, config.adaln, config.output_heads) == (layers, adaln, heads)
        sizes = released_sizes(config, 2)
        assert sizes.device(RESIDENT) == 2 * resident_parameters(config) and len(sizes.blocks) == layers


def test_bytes_follow_the_placement():
    block = 2 * num_block_parameters(GATED)
    result = planned(Placement(streamed=tuple(range(45)), slots=2))
    assert result.weight_bytes == released_sizes(GATED, 2).top + 7 * block
    assert result.streamed_bytes == 45 * block
    assert result.host_weight_bytes == 45 * block + released_sizes(GATED, 2).text
    assert result.peak_bytes == result.weight_bytes + result.run.peak
    assert "45 of 50 blocks streamed from host memory through 2 slots, 5 resident" in result.to_text()
    assert planned().streamed_bytes == 0 and "all 50 blocks resident" in planned().to_text()


def test_operations_are_those_of_the_definition():
    assert planned().teraflop == pytest.approx(1_870, rel=0.02)
    dense = planned(vsa=None, config=DENSE)
    pairs = 4 * dense.tokens**2 * 56 * 128 * 50 / 1e12
    assert dense.teraflop == pytest.approx(2 * dense.tokens * 50 * num_block_parameters(DENSE) / 1e12 + pairs)


def test_what_would_fit_does_fit():
    long = wanted(frames=362)
    budget = 9 * GIB
    said = alternatives(long, budget)
    every = Placement(streamed=tuple(range(50)), slots=2)
    frames = int(said[0].split()[0])
    for fits, count in ((True, frames), (False, frames + 17)):
        result = planned(every, frames=count, pass_rows=PASSES[-1])
        assert (long.sizes.needed(every, result.run.working) <= budget) == fits
    width, height = map(int, said[1].split()[0].split("x"))
    small = planned(every, frames=362, width=width, height=height, pass_rows=PASSES[-1])
    assert long.sizes.needed(every, small.run.working) <= budget
    assert alternatives(long, GIB) == []
    assert "an int8 file" in alternatives(wanted(), 5 * GIB)


def room(device):
    return Room(device=device, host=100 * GIB)


@pytest.mark.parametrize("frames", [124, 243, 362])
@pytest.mark.parametrize("policy", ["resident", "stream"])
def test_a_pass_has_as_many_tokens_as_fit(frames, policy):
    """At the least budget of each number of tokens it is that number, a byte below it the next or an error."""
    request, offload = wanted(frames=frames), Offload(policy=policy)
    placement = RESIDENT if policy == "resident" else Placement(streamed=tuple(range(50)), slots=2)
    least = {}
    for rows in PASSES:
        run = plan(replace(request, pass_rows=rows), placement).run
        least.setdefault(request.sizes.device(placement) + run.working, rows)
    assert len(least) > 1, "fewer tokens must save something here"
    below = [*list(least.values())[1:], None]
    for (budget, rows), fewer in zip(least.items(), below, strict=True):
        fitted, chosen = fit(request, offload, room(budget))
        assert fitted == replace(request, pass_rows=rows) and chosen.streamed == placement.streamed
        if fewer is not None:
            assert fit(request, offload, room(budget - 1))[0].pass_rows == fewer
            continue
        with pytest.raises(ConfigError, match="device memory=") as refused:
            fit(request, offload, room(budget - 1))
        assert ("What would fit" in str(refused.value)) == (policy == "stream")
    assert fit(request, offload, room(None))[0] == request
    assert "20,480 tokens a pass" in plan(replace(request, pass_rows=20_480)).to_text()


def test_what_refines_the_prompt_visits_where_blocks_do():
    """1.5 GB that are there before the forwards: they count where a run is smaller."""
    sizes, every = released_sizes(GATED, 2), Placement(streamed=tuple(range(50)), slots=2)
    assert 1.3 * GIB < sizes.text < 1.5 * GIB and sizes.top < GIB / 4
    assert sizes.device(RESIDENT) == sizes.top + sizes.text + sum(sizes.blocks)
    assert sizes.device(every) == sizes.top + 2 * sizes.blocks[0] and sizes.host(RESIDENT) == 0
    large, small = planned(every), planned(every, width=64, height=64, frames=5)
    assert large.peak_bytes == large.weight_bytes + large.run.peak
    assert small.peak_bytes == small.weight_bytes + sizes.text > small.weight_bytes + small.run.peak
    need = sizes.needed(every, small.run.working)
    assert need - sizes.device(every) == sizes.text + GIB // 2
    offload = Offload(policy="stream")
    fit(wanted(width=64, height=64, frames=5), offload, room(need))
    with pytest.raises(ConfigError, match="device memory="):
        fit(wanted(width=64, height=64, frames=5), offload, room(need - 1))


def test_products_in_8_bits_take_narrower_tokens():
    whole, narrow = planned().run, planned(fp8=True).run
    assert narrow.attention < whole.attention
    # the hidden state is there in both forms while one becomes the other, and its result is not there yet
    assert narrow.feed_forward - whole.feed_forward == 38_010 * (14_336 - 3 * 5_376)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 32 * 10**9}, r"tokens: at most 1,000,000"),
        ({"height": 32 * 10**5}, r"tokens: at most 1,000,000"),
        ({"frames": 17 * 10**12 + 5}, "more than 1,000,000 frames"),
        ({"frames": 17 * 10**4 + 5}, "at most 1,000,000"),
        ({"text_tokens": 10**12}, "at most 1,000,000"),
        ({"text_tokens": 0}, "expected at least 1"),
    ],
)
def test_absurd_sizes_are_one_error(changes, message):
    with pytest.raises(GeometryError, match=message):
        planned(**changes)


def test_illegal_sizes_name_legal_ones():
    with pytest.raises(GeometryError, match="Nearest: 704 or 736"):
        planned(height=720)
    with pytest.raises(GeometryError, match="Nearest: 107 or 124"):
        planned(frames=120)
