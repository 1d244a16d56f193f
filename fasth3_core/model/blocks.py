"""One transformer block, and the token refiner, as functions of a state and a mapping of weights.

S tokens, C hidden channels, H heads, D head channels. Weight names are those of single-file checkpoints, relative to
the block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels.dense_attention import dense_attention_eager
from ...kernels.quantise_rows import QuantisedRows
from ...kernels.segments import Segments
from ..config import DiTConfig
from ..weights.parts import Weight
from .linear import linear, operand_form
from .ops import TokenOps

EPS = 1e-5
"""Of every norm of the transformer."""

PASS_ROWS = 40960
"""Tokens a pass through the products of a block, where a run is not given fewer: the hidden state of the feed-forward
then takes no more memory than q, k, v and the gate of a 10-second request do. A block of 37,966 tokens on an H200:
62.2 ms with its feed-forward in one pass, 62.5 in two, 63.5 in three."""

Weights = Mapping[str, torch.Tensor]
Rows = torch.Tensor | QuantisedRows
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(q, k, v, gate), each [S, H, D], gate None without VSA -> [S, H, D], which may be q overwritten."""


@dataclass(frozen=True)
class Rope:
    """Rotary tables, [S, 3 x frequencies], in the hidden dtype and the order of the tokens."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_table(position_ids: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> Rope:
    """Angles position * inv_freq in fp32 for the axes t, h, w side by side; rounded to `dtype` once, at the end.

    Args:
        position_ids: [S, 3] float64.
        inv_freq: [frequencies] fp32.
    """
    angles = (position_ids.to(inv_freq.device, torch.float32)[:, :, None] * inv_freq).flatten(1)
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def inverse_frequencies(count: int) -> torch.Tensor:
    """10000^(-j / count), fp32 [count]: for files that do not store `rope.inv_freq`."""
    return 10000.0 ** (-torch.arange(count, dtype=torch.float32, device="cpu") / count)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: None = None) -> torch.Tensor:
    """Softmax attention over all tokens, [S, H, D] -> [S, H, D] over q, in the form of `Attend`."""
    return dense_attention_eager(q, k, v, out=q)


def passes(tokens: int, rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of at most `rows` tokens each, in order."""
    return ((start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def project_in(
    x: torch.Tensor,
    normed: Callable[[int, int], Rows],
    w: Weights,
    config: DiTConfig,
    ops: TokenOps,
    rope: Rope | None,
    gated: bool,
    pass_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens x [S, C] -> what `Attend` takes; q, k and v are slices of one tensor.

    Args:
        normed: (start, stop) -> those tokens after the norm.
        rope: None norms q and k alone.
    """
    weights = [w["attn.qkv_proj.weight"], *([w["attn.to_gate_compress.weight"]] if gated else [])]
    qkv, *gates = _products(x, normed, weights, ops, pass_rows)
    q, k, v = qkv.view(len(x), 3, config.num_heads, config.head_dim).unbind(1)
    if rope is None:
        q = F.rms_norm(q, (config.head_dim,), w["attn.q_norm.weight"], EPS)
        k = F.rms_norm(k, (config.head_dim,), w["attn.k_norm.weight"], EPS)
    else:
        ops.qk_norm_rope(q, k, w["attn.q_norm.weight"], w["attn.k_norm.weight"], rope.cos, rope.sin, EPS)
    return q, k, v, gates[0].view_as(q) if gated else None


def _products(
    x: torch.Tensor, normed: Callable[[int, int], Rows], weights: Sequence[Weight], ops: TokenOps, pass_rows: int
) -> list[torch.Tensor]:
    """Normed tokens times each weight [out, C] -> [S, out]. Of several passes only one has its normed tokens."""

    def times(h: Rows, results: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        return [linear(h, weight, ops=ops, out=out) for weight, out in zip(weights, results, strict=True)]

    if len(x) <= pass_rows:
        return times(normed(0, len(x)), [None] * len(weights))
    products = [x.new_empty(len(x), weight.shape[0]) for weight in weights]
    for start, stop in passes(len(x), pass_rows):
        times(normed(start, stop), [product[start:stop] for product in products])
    return products


def project_out(attended: torch.Tensor, w: Weights, ops: TokenOps) -> torch.Tensor:
    """What `Attend` gives [S, H, D] -> [S, C]."""
    return linear(attended.flatten(1), w["attn.out_proj.weight"], ops=ops)


def feed_forward(h: Rows, w: Weights, ops: TokenOps) -> torch.Tensor:
    """SwiGLU feed-forward of normed tokens [S, C] -> [S, C]."""
    gate, value = linear(h, w["mlp.fc1.weight"], ops=ops).chunk(2, dim=-1)
    hidden = ops.swiglu(value, gate, None, operand_form(w["mlp.fc2.weight"]))
    del gate, value  # what is quantised no longer lies in them
    return linear(hidden, w["mlp.fc2.weight"], ops=ops)


def main_block(
    x: torch.Tensor,
    w: Weights,
    config: DiTConfig,
    ops: TokenOps,
    table: torch.Tensor,
    segments: Segments,
    rope: Rope,
    attend: Attend,
    gated: bool,
    check_interrupt: Callable[[], None],
    pass_rows: int = PASS_ROWS,
) -> None:
    """One of the main blocks, in place on x [S, C].

    Args:
        table: [R, 6, C] AdaLN parameters (`time.block_table`).
        segments: row of the table for each token.
        gated: whether the attention takes the gate projection of the modulated tokens.
        pass_rows: tokens that go through the products together: fewer take less memory and a little more time.
    """
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = table.unbind(1)
    projections = [w["attn.qkv_proj.weight"], *([w["attn.to_gate_compress.weight"]] if gated else [])]
    form = operand_form(*projections)

    def normed(start: int, stop: int) -> Rows:
        part = segments.part(start, stop)
        return ops.rms_modulate(x[start:stop], w["norm1.weight"], scale_a, shift_a, part, EPS, form)

    # no name for what one call hands to the next: the normed tokens are gone while the attention runs, and the gate is
    # while its result is projected
    y = project_out(attend(*project_in(x, normed, w, config, ops, rope, gated, pass_rows)), w, ops)
    check_interrupt()
    form = operand_form(w["mlp.fc1.weight"])
    h = ops.residual_rms_modulate(x, y, gate_a, w["norm2.weight"], scale_f, shift_f, segments, EPS, form)
    del y
    for start, stop in passes(len(x), pass_rows):
        ops.gated_residual(x[start:stop], feed_forward(h[start:stop], w, ops), gate_f, segments.part(start, stop))


def refine_text(refiner: Weights, config: DiTConfig, ops: TokenOps, text_states: torch.Tensor) -> torch.Tensor:
    """Prompt states [L, text_dim] -> refined text tokens [L, C]: no rotation, no time, text rows alone.

    Depends on the prompt only, so a request runs it once.
    """
    x = linear(text_states, refiner["condition_proj.weight"], refiner["condition_proj.bias"])
    for i in range(config.num_refiner_layers):
        prefix = f"token_refiner.blocks.{i}."
        w = {name[len(prefix) :]: value for name, value in refiner.items() if name.startswith(prefix)}
        h = F.rms_norm(x, (config.hidden_size,), w["norm1.weight"], EPS)
        qkv = project_in(h, lambda start, stop, h=h: h[start:stop], w, config, ops, None, False, PASS_ROWS)
        x = x + project_out(dense_attention(*qkv), w, ops)
        h = F.rms_norm(x, (config.hidden_size,), w["norm2.weight"], EPS)
        for start, stop in passes(len(x), PASS_ROWS):
            x[start:stop] += feed_forward(h[start:stop], w, ops)
    return F.rms_norm(x, (config.hidden_size,), refiner["token_refiner.final_norm.weight"], EPS)
