"""Mirrors kernels/registry.py: one decision per run, nothing silently less."""

import logging

import pytest
import torch
from comfyui_fasth3.kernels import registry
from comfyui_fasth3.kernels.device import Case
from comfyui_fasth3.kernels.registry import BackendUnavailable, Impl

CASE = Case(device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def op(monkeypatch):
    """An op of three implementations: the best refuses, the second cannot be imported, the third runs."""
    monkeypatch.setattr(registry, "_IMPLS", {})
    monkeypatch.setattr(registry, "_LOGGED", set())

    def missing():
        raise ImportError("no module named fast")

    registry.register(Impl(op="double", name="reference", rank=100, load=lambda: lambda x: 2 * x))
    registry.register(Impl(op="double", name="gpu", rank=1, load=missing, why_not=lambda case: f"not on {case.device}"))
    registry.register(Impl(op="double", name="fast", rank=2, load=missing))
    return "double"


def test_auto_falls_back_keeps_the_reasons_and_logs_them_once(op, caplog):
    with caplog.at_level(logging.WARNING, logger="fasth3.kernels"):
        first, second = (registry.resolve(op, "auto", CASE) for _ in range(2))
    assert first.name == "reference"
    assert first.refused == second.refused == {"gpu": "not on cpu", "fast": "ImportError: no module named fast"}
    assert [r.message for r in caplog.records] == [
        "double: not using gpu: not on cpu",
        "double: not using fast: ImportError: no module named fast",
    ]


@pytest.mark.parametrize(
    ("name", "why"), [("gpu", "not on cpu"), ("fast", "no module"), ("sage", "unknown; double has gpu")]
)
def test_a_named_backend_runs_or_raises(op, caplog, name, why):
    with pytest.raises(BackendUnavailable, match=f"backend '{name}' cannot run here.*{why}") as raised:
        registry.resolve(op, name, CASE)
    assert list(raised.value.refused) == [name]
    assert not caplog.records, "a refusal that raises is not also a warning"


def test_all_refused_raises_with_every_reason(op):
    registry._IMPLS[op].pop()
    with pytest.raises(BackendUnavailable, match="gpu: not on cpu; fast: ImportError"):
        registry.resolve(op, "auto", CASE)


def test_counts_belong_to_the_run(op):
    one, other = registry.resolve(op, "auto", CASE), registry.resolve(op, "auto", CASE)
    assert [one(1), one(2), other(3)] == [2, 4, 6]
    rows = registry.table([one, other])
    assert [row["calls"] for row in rows] == [2, 1]
    assert rows[0]["refused"] == one.refused and rows[0]["backend"] == "reference"


def test_report_has_a_row_for_each_implementation(op):
    assert registry.report(CASE) == [
        {"op": op, "backend": "gpu", "why_not": "not on cpu"},
        {"op": op, "backend": "fast", "why_not": "ImportError: no module named fast"},
        {"op": op, "backend": "reference", "why_not": None},
    ]


def test_a_name_is_registered_once(op):
    with pytest.raises(ValueError, match="double: 'fast' is already registered"):
        registry.register(Impl(op=op, name="fast", rank=3, load=lambda: None))


def test_every_op_has_a_reference_that_runs_anywhere():
    rows = registry.report(CASE)
    ops = {row["op"] for row in rows}
    expected = "block_sparse_attention coarse_branch dense_attention int8_linear tile_mean tile_topk"
    assert ops >= set(expected.split())
    assert {row["op"] for row in rows if row["backend"] == "reference" and row["why_not"] is None} == ops
