"""torch.compile around a block: one graph, and the bits of the block as it is."""

from functools import partial

import pytest
import torch
from comfyui_fasth3.fasth3_core.config import VSAConfig
from comfyui_fasth3.fasth3_core.model import blocks, dit
from comfyui_fasth3.fasth3_core.model.ops import resolve_token_ops
from comfyui_fasth3.fasth3_core.packing.layout import build_layout
from comfyui_fasth3.fasth3_core.vsa.attention import attention, resolve_ops
from comfyui_fasth3.fasth3_core.vsa.tiles import tile_plan
from comfyui_fasth3.fasth3_core.weights.fp8 import is_projection, to_fp8
from comfyui_fasth3.kernels.device import Case
from comfyui_fasth3.kernels.segments import Segments

from .checkpoints import quantise
from .tiny import TEXT_DIM, tiny_store

FORMS = {"plain": lambda weight: weight, "fp8": to_fp8, "int8": partial(quantise, group=16)}


@pytest.fixture(autouse=True)
def _fresh_graphs():
    torch._dynamo.reset()
    # its table of functions may be from a test in which torch.empty was another
    torch._dynamo.trace_rules.clear_lru_cache()


@pytest.fixture(autouse=True)
def _nan_filled_empty():
    """Takes the place of the one that replaces torch.empty: the tracer knows torch's own."""


class Block:
    """A block of a tiny request with sparse attention and a gate, in two passes."""

    def __init__(self, backend, tile_size, form):
        store = tiny_store(gates=True)
        layout = build_layout(torch.ones(5, dtype=torch.long), 3, 12, 20, 9)
        case = Case(device=torch.device("cpu"), dtype=store.dtype, tile_size=tile_size)
        plan = tile_plan(layout.prefix, layout.grid, tile_size)
        config = VSAConfig(keep_rule="top_k", top_k=1, tile_size=tile_size, backend=backend)
        self.vsa_ops, self.ops = resolve_ops(backend, case), resolve_token_ops(backend, case)
        self.attend = lambda q, k, v, gate: attention(
            q, k, v, gate, plan, config, ops=self.vsa_ops, in_place=True
        )
        step, cpu = dit.step_rows(layout, 0.3, 0.1, 1.0), torch.device("cpu")
        text = torch.randn(layout.prefix[0], TEXT_DIM)
        self.prepared = dit.prepare(
            store, layout, plan.order, text, [], [step], cpu, self.ops, lambda: None, use_gates=True
        )
        self.weights = {
            name: FORMS[form](weight) if is_projection(f"blocks.0.{name}") else weight
            for name, weight in store.block(0).items()
        }
        self.segments, self.config = Segments.of(step.segments, "cpu"), store.config
        self.stream = torch.randn(layout.num_tokens, self.config.hidden_size)

    def __call__(self, x):
        blocks.main_block(
            x, self.weights, self.config, self.ops, self.prepared.tables[0][0], self.segments, self.prepared.rope,
            self.attend, True, lambda: None, pass_rows=100,
        )
        return x


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(("backend", "tile_size"), [("eager", 64), ("eager", 256), ("reference", 64)])
def test_a_block_is_one_graph_and_the_same_bits(backend, tile_size, form):
    block = Block(backend, tile_size, form)
    with torch.inference_mode():
        expected = block(block.stream.clone())
        counted = {row["op"]: row["calls"] for row in (*block.ops.table(), *block.vsa_ops.table())}
        compiled = torch.compile(block.__call__, backend="aot_eager", fullgraph=True)
        out = compiled(block.stream.clone())
        assert torch.equal(out, expected) and not torch.equal(out, block.stream)
        assert torch.equal(compiled(block.stream.clone()), expected)
    assert {row["op"]: row["calls"] for row in (*block.ops.table(), *block.vsa_ops.table())} == counted
