"""Mirrors fasth3_core/planning.py."""

import pytest
from comfyui_fasth3.fasth3_core.config import DiTConfig, VSAConfig
from comfyui_fasth3.fasth3_core.errors import GeometryError
from comfyui_fasth3.fasth3_core.planning import num_parameters, plan, released, resident_parameters

from .tiny import tiny_tensors

VSA = VSAConfig(keep_rule="sparsity", sparsity=0.9, tile_size=64)


def planned(**changes):
    request = dict(width=1344, height=768, frames=124, text_tokens=300, forwards=4, config=released(gates=True),
                   vsa=VSA, weight_bytes=0, element_size=2)
    return plan(**(request | changes))


def test_parameters_of_the_release():
    assert num_parameters(released(gates=False)) == 33_122_992_896
    assert num_parameters(released(gates=True)) - num_parameters(released(gates=False)) == 1_926_758_400


@pytest.mark.parametrize("gates", [True, False])
def test_parameters_of_any_transformer(gates):
    tensors = tiny_tensors(gates=gates, num_layers=3)
    config = DiTConfig.from_shapes({name: tuple(t.shape) for name, t in tensors.items()})
    assert num_parameters(config) == sum(t.numel() for name, t in tensors.items() if name != "rope.inv_freq")


def test_adaln_of_the_blocks_is_not_resident():
    config = released(gates=True)
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
    assert 2.5 < long.activation_bytes / short.activation_bytes < 3.0
    assert planned(weight_bytes=1).activation_bytes == short.activation_bytes


def test_illegal_sizes_name_legal_ones():
    with pytest.raises(GeometryError, match="Nearest: 704 or 736"):
        planned(height=720)
    with pytest.raises(GeometryError, match="Nearest: 107 or 124"):
        planned(frames=120)
