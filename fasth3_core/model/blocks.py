"""One transformer block, and the token refiner, as functions of a state and a mapping of weights.

S tokens, C hidden channels, H heads, D head channels. Weight names are those of single-file checkpoints, relative to
the block.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels.dense_attention import dense_attention_eager
from ...kernels.quantise_rows import QuantisedRows
from ...kernels.segments import Segments
from ..config import DiTConfig
from .linear import linear, operand_form
from .ops import TokenOps

EPS = 1e-5
"""Of every norm of the transformer."""

FF_ROWS = 40960
"""Tokens a pass through the feed-forward, whose hidden state then takes no more memory than q, k, v and the gate of a
10-second request do. A block of 37,966 tokens on an H200: 62.2 ms in one pass, 62.5 in two, 63.5 in three."""

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


def project_in(
    h: Rows, w: Weights, config: DiTConfig, ops: TokenOps, rope: Rope | None, gated: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Normed tokens [S, C] -> what `Attend` takes; q, k and v are slices of one tensor."""
    qkv = linear(h, w["attn.qkv_proj.weight"], ops=ops)
    q, k, v = qkv.view(len(h), 3, config.num_heads, config.head_dim).unbind(1)
    if rope is None:
        q = F.rms_norm(q, (config.head_dim,), w["attn.q_norm.weight"], EPS)
        k = F.rms_norm(k, (config.head_dim,), w["attn.k_norm.weight"], EPS)
    else:
        ops.qk_norm_rope(q, k, w["attn.q_norm.weight"], w["attn.k_norm.weight"], rope.cos, rope.sin, EPS)
    gate = linear(h, w["attn.to_gate_compress.weight"], ops=ops).view_as(q) if gated else None
    return q, k, v, gate


def project_out(attended: torch.Tensor, w: Weights, ops: TokenOps) -> torch.Tensor:
    """What `Attend` gives [S, H, D] -> [S, C]."""
    return linear(attended.flatten(1), w["attn.out_proj.weight"], ops=ops)


def feed_forward(h: Rows, w: Weights, ops: TokenOps) -> Iterator[tuple[int, int, torch.Tensor]]:
    """SwiGLU feed-forward of normed tokens [S, C], FF_ROWS at a time: (start, stop, their result [stop - start, C])."""
    for start in range(0, len(h), FF_ROWS):
        stop = min(start + FF_ROWS, len(h))
        yield start, stop, _feed_forward(h[start:stop], w, ops)


def _feed_forward(h: Rows, w: Weights, ops: TokenOps) -> torch.Tensor:
    gate, value = linear(h, w["mlp.fc1.weight"], ops=ops).chunk(2, dim=-1)
    hidden = ops.swiglu(value, gate, None, operand_form(w["mlp.fc2.weight"]))
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
) -> None:
    """One of the main blocks, in place on x [S, C].

    Args:
        table: [R, 6, C] AdaLN parameters (`time.block_table`).
        segments: row of the table for each token.
        gated: whether the attention takes the gate projection of the modulated tokens.
    """
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = table.unbind(1)
    projections = [w["attn.qkv_proj.weight"], *([w["attn.to_gate_compress.weight"]] if gated else [])]
    form = operand_form(*projections)
    # no name for what one call hands to the next: the normed tokens are gone while the attention runs, and the gate is
    # while its result is projected
    y = project_out(attend(*project_in(
        ops.rms_modulate(x, w["norm1.weight"], scale_a, shift_a, segments, EPS, form), w, config, ops, rope, gated
    )), w, ops)  # fmt: skip
    check_interrupt()
    form = operand_form(w["mlp.fc1.weight"])
    h = ops.residual_rms_modulate(x, y, gate_a, w["norm2.weight"], scale_f, shift_f, segments, EPS, form)
    del y
    for start, stop, y in feed_forward(h, w, ops):
        ops.gated_residual(x[start:stop], y, gate_f, segments.part(start, stop))


def refine_text(top: Weights, config: DiTConfig, ops: TokenOps, text_states: torch.Tensor) -> torch.Tensor:
    """Prompt states [L, text_dim] -> refined text tokens [L, C]: no rotation, no time, text rows alone.

    Depends on the prompt only, so a request runs it once.
    """
    x = linear(text_states, top["condition_proj.weight"], top["condition_proj.bias"])
    for i in range(config.num_refiner_layers):
        prefix = f"token_refiner.blocks.{i}."
        w = {name[len(prefix) :]: value for name, value in top.items() if name.startswith(prefix)}
        h = F.rms_norm(x, (config.hidden_size,), w["norm1.weight"], EPS)
        x = x + project_out(dense_attention(*project_in(h, w, config, ops, None, gated=False)), w, ops)
        for start, stop, y in feed_forward(F.rms_norm(x, (config.hidden_size,), w["norm2.weight"], EPS), w, ops):
            x[start:stop] += y
    return F.rms_norm(x, (config.hidden_size,), top["token_refiner.final_norm.weight"], EPS)
