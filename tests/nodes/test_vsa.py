"""Mirrors nodes/vsa.py: widgets to settings."""

import pytest
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.errors import ConfigError
from comfyui_fasth3.nodes.vsa import parse_layers

DEFAULTS = dict(
    keep_rule="contract", sparsity=0.9, top_k=64, tile_size="contract", mode="exempt", dense_first_steps=0,
    dense_layers="", backend="auto",
)


def test_defaults_are_the_contract(run):
    assert run("FastH3VSAConfig", **DEFAULTS).args[0] == VSAConfig()


def test_every_widget_arrives(run):
    given = dict(keep_rule="top_k", sparsity=0.5, top_k=7, tile_size="256", mode="compete", dense_first_steps=2,
                 dense_layers="0, 2-3", backend="eager")
    assert run("FastH3VSAConfig", **given).args[0] == VSAConfig(
        keep_rule="top_k", sparsity=0.5, top_k=7, tile_size=256, mode="compete", dense_first_steps=2,
        dense_layers=(0, 2, 3), backend="eager",
    )


@pytest.mark.parametrize("text, layers", [
    ("", ()), (" ", ()), ("5", (5,)), ("3,1,1", (1, 3)), ("0-2, 40-41", (0, 1, 2, 40, 41)), ("7-7,", (7,)),
])  # fmt: skip
def test_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "1;2", "1.5", "1--2"])
def test_bad_layers(text):
    with pytest.raises(ConfigError, match="dense_layers"):
        parse_layers(text)


@pytest.mark.parametrize("change", [{"sparsity": 1.0}, {"sparsity": float("nan")}, {"top_k": 0}, {"mode": "both"}])
def test_bad_values(run, change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        run("FastH3VSAConfig", **DEFAULTS | change)
