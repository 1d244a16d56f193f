"""Mirrors fasth3_core/config.py."""

import math

import pytest
from comfyui_fasth3.fasth3_core.config import DiTConfig, VSAConfig
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError

from .tiny import tiny_tensors


def shapes(**kwargs):
    return {name: tuple(t.shape) for name, t in tiny_tensors(**kwargs).items()}


def test_dimensions_come_from_the_tensors():
    config = DiTConfig.from_shapes(shapes(num_layers=3, hidden_size=96, num_heads=3, head_dim=32, ffn_dim=40))
    assert (config.hidden_size, config.num_layers, config.num_heads, config.head_dim) == (96, 3, 3, 32)
    assert (config.ffn_dim, config.in_channels, config.audio_in_channels, config.text_dim) == (40, 24, 32, 20)
    assert (config.adaln, config.adaln_rank, config.has_gates, config.output_heads) == ("full", None, True, 1)
    assert config.inner_dim == config.hidden_size and config.video_row_dim == 96


def test_configuration_wins_where_tensors_are_silent_and_must_agree_elsewhere():
    without_rope = shapes()
    del without_rope["rope.inv_freq"]
    with pytest.raises(CheckpointError, match=r"no rope.inv_freq and its heads are 32 wide"):
        DiTConfig.from_shapes(without_rope)
    assert DiTConfig.from_shapes(without_rope, {"rope_freq_dim": 5}).rope_freq_dim == 5
    with pytest.raises(CheckpointError, match="says num_layers=50, the tensors say 2"):
        DiTConfig.from_shapes(shapes(), {"layers": 50})
    with pytest.raises(CheckpointError, match="need 6 x 6 channels, but a head has 32"):
        DiTConfig.from_shapes(without_rope, {"rope_freq_dim": 6})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("rope_freq_dim", "16", "rope_freq_dim='16': expected a whole number"), ("rope_freq_dim", -1, "-1 rotary"),
     ("rope_freq_dim", True, "rope_freq_dim=True: expected"), ("adaln_rank", 16, "adaln_rank=16, the tensors say None"),
     ("layers", "two", "num_layers='two', the tensors say 2"), ("heads", [2], r"num_heads=\[2\]")],
)  # fmt: skip
def test_nonsense_in_a_configuration_is_quoted(field, value, message):
    silent = {name: shape for name, shape in shapes().items() if name != "rope.inv_freq"}
    with pytest.raises(CheckpointError, match=message):
        DiTConfig.from_shapes(silent, {"rope_freq_dim": 5, field: value})


def test_the_time_embedder_of_a_configuration_is_no_concern_of_a_table_over_time():
    """The configuration of the release beside a file whose AdaLN was reduced to a curve."""
    curve = {name: shape for name, shape in shapes().items() if not name.startswith("time_embedder.")}
    curve["adaln_t_table"] = (1025, 8)
    release = {"timestep_input_dim": 256, "time_embed_hidden_size": 5376, "time_embed_dim": 2688, "layers": 2}
    config = DiTConfig.from_shapes(curve, release)
    assert (config.adaln, config.adaln_rank, config.freq_dim) == ("curve", 8, 0)


def test_wide_heads_have_sixteen_frequencies():
    wide = shapes(head_dim=128)
    del wide["rope.inv_freq"]
    assert DiTConfig.from_shapes(wide).rope_freq_dim == 16


def test_missing_block_is_named():
    holed = {name: shape for name, shape in shapes(num_layers=3).items() if not name.startswith("blocks.1.")}
    with pytest.raises(CheckpointError, match=r"blocks \[1\] are missing"):
        DiTConfig.from_shapes(holed)


# sparsity, tiles, kept: the product is rounded up in doubles
@pytest.mark.parametrize(
    ("sparsity", "tiles", "kept"),
    [(0.9, 660, 66), (0.9, 10, 1), (0.95, 660, 34), (0.95, 180, 10), (0.8, 660, 132), (0.0, 7, 7), (0.999, 3, 1)],
)
def test_kept_tiles(sparsity, tiles, kept):
    config = VSAConfig(keep_rule="sparsity", sparsity=sparsity)
    assert config.kept_tiles(tiles) == kept == max(1, min(math.ceil((1 - sparsity) * tiles), tiles))


def test_dense_steps_layers_and_top_k():
    config = VSAConfig(keep_rule="top_k", top_k=9, dense_first_steps=1, dense_layers=(3,))
    assert [config.kept_tiles(100, step, layer) for step, layer in ((0, 0), (1, 3), (1, 0))] == [100, 100, 9]
    assert config.kept_tiles(5, 1, 0) == 5


def test_contract_fills_in_what_is_left_open():
    config = VSAConfig().resolved(sparsity=0.8, tile_size=64)
    assert (config.keep_rule, config.sparsity, config.tile_size) == ("sparsity", 0.8, 64)
    kept = VSAConfig(keep_rule="top_k", top_k=3, tile_size=256).resolved(sparsity=0.8, tile_size=64)
    assert (kept.keep_rule, kept.top_k, kept.tile_size) == ("top_k", 3, 256)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sparsity", 1.0, r"sparsity=1.0: expected a fraction with 0 <= sparsity < 1"),
        ("sparsity", float("nan"), "sparsity=nan"),
        ("tile_size", 100, r"tile_size=100: expected one of \[64, 128, 256\]"),
        ("mode", "sometimes", "mode='sometimes'"),
        ("keep_rule", "all", "keep_rule='all'"),
        ("top_k", 0, "top_k=0: expected 1 or more"),
        ("dense_first_steps", -1, "dense_first_steps=-1"),
        ("dense_layers", (-1,), r"dense_layers=\(-1,\)"),
    ],
)
def test_bad_settings_name_field_value_and_range(field, value, message):
    with pytest.raises(ConfigError, match=message):
        VSAConfig(**{field: value})
