"""The operators that torch.compile puts into graphs: schemas and fakes tell the truth, results are the ops'."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.vsa.selection import pooled_scores
from comfyui_fasth3.kernels import registry
from comfyui_fasth3.kernels.device import Case
from comfyui_fasth3.kernels.quantise_rows import QuantisedRows, quantise_rows
from comfyui_fasth3.kernels.segments import Segments

from .vsa_cases import fused, offsets_of, random_lists

SIZES = (5, 3, 4, 4, 2, 4)
"""Two prefix tiles, four video tiles."""


EVERY_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""Of opcheck; two of them cannot compare float8 arguments."""


@pytest.fixture(autouse=True)
def _fresh_graphs():
    torch._dynamo.reset()


def segments(tokens):
    return Segments.of([(0, 2, 1), (2, tokens, 0)], "cpu")


def modulation(count, channels):
    return torch.randn(2, count, channels).unbind(1)


def attention_inputs():
    q, k, v = fused(sum(SIZES), 3, 16)
    return q, k, v, offsets_of(SIZES), *random_lists(3, 4, 6, 4)


def arguments():
    """Op -> arguments of one call, as the model makes it."""
    x, y = torch.randn(2, 7, 32)
    (gate, scale, shift), weight = modulation(3, 32), torch.rand(32) + 0.5
    q, k, v, offsets, index, count = attention_inputs()
    angles = torch.randn(q.shape[0], 6)
    heads = torch.rand(2, 16).unbind()
    W = quantise_rows(torch.randn(16, 32), "fp8")
    int8 = torch.randint(-127, 128, (48, 32), dtype=torch.int8)
    halves = torch.randn(7, 64).chunk(2, dim=1)
    return {
        "rms_modulate": (x, weight, scale, shift, segments(7), 1e-5),
        "rms_modulate in fp8": (x, weight, scale, shift, segments(7), 1e-5, "fp8"),
        "residual_rms_modulate": (x, y, gate, weight, scale, shift, segments(7), 1e-5),
        "residual_rms_modulate in int8": (x, y, gate, weight, scale, shift, segments(7), 1e-5, "int8"),
        "gated_residual": (x, y, gate, segments(7)),
        "qk_norm_rope": (q, k, *heads, angles.cos(), angles.sin(), 1e-5),
        "swiglu": (*halves, None, ""),
        "swiglu in fp8": (*halves, torch.randn(64), "fp8"),
        "quantise_rows": (x, "fp8"),
        "fp8_linear": (quantise_rows(x, "fp8"), W, torch.bfloat16),
        "int8_linear": (x, int8, torch.rand(48), torch.randn(48), 16),
        "tile_mean": (q, offsets, 5),
        "tile_topk": (torch.randn(3, 4, 6), 2, 2, "exempt"),
        "block_sparse_attention": (q[8:], k, v, offsets, index, count),
        "coarse_branch": (q.clone(), torch.randn(3, 6, 6), torch.randn(3, 6, 16), v, offsets),
        "dense_attention": (q, k, v),
    }


def cloned(args):
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def tensors(*values):
    """Every tensor in results or arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, QuantisedRows):
            yield from (value.data, value.scale)
        elif isinstance(value, tuple):
            yield from tensors(*value)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


CASES = pytest.mark.parametrize("case", list(arguments()))
BACKENDS = pytest.mark.parametrize("backend", ["eager", "reference"])


@CASES
@BACKENDS
def test_a_graph_computes_what_the_op_does(case, backend):
    """aot_eager traces with the fakes and turns operators that overwrite into ones that do not."""
    run = registry.resolve(case.split()[0], backend, Case(device=torch.device("cpu"), dtype=torch.float32))
    args = arguments()[case]
    plain, compiled = cloned(args), cloned(args)
    expected = run(*plain)
    out = torch.compile(lambda *args: run(*args), backend="aot_eager", fullgraph=True)(*compiled)
    assert run.calls == 1
    found, wanted = list(tensors(out)), list(tensors(expected))
    assert len(found) == len(wanted) and all(map(same, found, wanted))
    if not case.startswith("swiglu"):  # whose arguments are lost
        assert all(map(same, tensors(*compiled), tensors(*plain)))


@pytest.mark.parametrize("op", ["block_sparse_attention", "dense_attention"])
@BACKENDS
def test_a_graph_writes_over_its_queries(op, backend):
    run = registry.resolve(op, backend, Case(device=torch.device("cpu"), dtype=torch.float32))
    q, k, v, *lists = attention_inputs()
    first, lists = (8, lists) if op == "block_sparse_attention" else (0, [])
    qkv = torch.stack([q, k, v], dim=1)
    expected = qkv.clone()

    def within(qkv, *lists):
        run(qkv[first:, 0], qkv[:, 1], qkv[:, 2], *lists, out=qkv[first:, 0])

    within(expected, *lists)
    torch.compile(within, backend="aot_eager", fullgraph=True)(qkv, *lists)
    assert run.calls == 1 and torch.equal(qkv, expected) and not torch.equal(qkv[:, 0], q)


@CASES
@BACKENDS
def test_schema_and_fake_agree_with_a_call(case, backend, monkeypatch):
    """opcheck of the operator, on the arguments that it was called with."""
    op = case.split()[0]
    operator, calls = getattr(torch.ops.comfyui_fasth3, op), []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is operator.default:
                calls.append(args)
            return function(*args, **(kwargs or {}))

    with Recorder():
        registry._IN_GRAPH[op](backend, *cloned(arguments()[case]))
    checks = ("test_autograd_registration", "test_faketensor") if op == "fp8_linear" else EVERY_CHECK
    torch.library.opcheck(operator.default, calls[0], test_utils=checks)


def test_pooled_scores():
    torch.library.opcheck(torch.ops.comfyui_fasth3.pooled_scores.default, (torch.randn(2, 3, 8), torch.randn(2, 5, 8)))
    compiled = torch.compile(pooled_scores, backend="aot_eager", fullgraph=True)
    q, k = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    assert torch.equal(compiled(q, k), pooled_scores(q, k))


def test_every_op_of_a_run_has_an_operator():
    from comfyui_fasth3.fasth3_core.model.ops import TokenOps
    from comfyui_fasth3.fasth3_core.vsa.attention import VSAOps

    ops = {*TokenOps.__annotations__, *VSAOps.__annotations__} - {"backend", "case", "whole_tiles"}
    lazy = {name for name, value in vars(TokenOps).items() if hasattr(value, "attrname")}
    assert ops | lazy == set(registry._IN_GRAPH)
