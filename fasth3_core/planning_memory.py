"""Device bytes of a forward beside the weights, named buffer by buffer, so that a wrong estimate shows which is wrong.

S tokens, C hidden and I = heads x head channels, F feed-forward channels, N tiles. Peaks are those of torch's allocator
(`max_memory_allocated`); what a run needs of a device is `working_bytes`.
"""

from dataclasses import asdict, dataclass

from ..kernels.dense_attention.eager import RESULT_BYTES
from .config import PATCH, DiTConfig
from .model.blocks import PASS_ROWS
from .model.time import BLOCK_ROWS
from .vsa.attention import SCORE_BYTES

_LIBRARIES = 96 << 20
"""Workspaces of the matrix libraries and small tensors: up to 0.09 GB are measured beside the buffers below."""

_HEADROOM = 1.10, 608 << 20
"""For what torch's allocator cannot use between its blocks: with 6 % and 0.25 GiB a capped run failed."""

_GATHERED = 1 << 30
"""What the eager backend of the sparse op gathers at once on a CUDA device."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """What the sparse op works on."""

    prefix: int
    video: int
    kept: int
    parts: int = 1
    """Parts of at most 64 tokens that a tile is handed to kernels in."""

    @property
    def total(self) -> int:
        return self.prefix + self.video


@dataclass(frozen=True, kw_only=True)
class RunBytes:
    """What lies on the device at once."""

    tables: int
    """AdaLN of every block and step."""
    request: int
    """Rotary tables, orders, latents and refined text: held for the whole run."""
    attention: int
    """In the attention half of a block: residual stream, q, k, v and gate; with them the normed tokens, then what the
    op has of its own. The result takes the place of q."""
    feed_forward: int
    """In the other half: residual stream, normed tokens, hidden state and result of a pass."""

    @property
    def peak(self) -> int:
        return self.tables + self.request + max(self.attention, self.feed_forward) + _LIBRARIES

    @property
    def working(self) -> int:
        """What a run needs free beside its weights."""
        share, fixed = _HEADROOM
        return int(self.peak * share) + fixed

    def to_dict(self) -> dict[str, int]:
        return asdict(self) | {"peak": self.peak, "working": self.working}


def run_bytes(
    *,
    tokens: int,
    text_tokens: int,
    video_tokens: int,
    conditions: bool,
    forwards: int,
    config: DiTConfig,
    element: int,
    tiles: Tiles | None,
    gated: bool,
    dense: bool = False,
    eager: bool = False,
    dequantised: int = 0,
    fp8: bool = False,
    pass_rows: int = PASS_ROWS,
) -> RunBytes:
    """Estimate one request.

    Args:
        tokens: S, conditions included; text_tokens and video_tokens are those of the prompt and of the target.
        conditions: whether there are keyframes or references, whose clocks are their own.
        element: bytes per activation element (2 for bf16).
        tiles: of the sparse op; None for dense attention.
        gated: whether the gates are not all zero.
        dense: whether any block attends densely.
        eager: whether the sparse op gathers with torch alone on a CUDA device.
        dequantised: bytes that a value of a quantised weight takes while it is widened; 0 without any.
        fp8: whether the products of the blocks take their rows in fp8.
        pass_rows: tokens that go through the products together.
    """
    C, inner, ffn = config.hidden_size, config.inner_dim, config.ffn_dim
    rows, several = min(tokens, pass_rows), tokens > pass_rows
    stream, heads_wide = tokens * C * element, tokens * inner * element
    normed = C if fp8 else C * element  # a token
    widened = element if dequantised else 0  # a value of a weight that is multiplied with in its wide form

    def product(weight: int, result: int) -> int:
        """Of one product beside what it works on; a weight is wide twice before there is a result."""
        return max(dequantised * weight, widened * weight + result)

    qkv, gate = 3 * heads_wide, gated * heads_wide
    if several:
        project = rows * normed + qkv + gate + dequantised * 3 * inner * C
    else:
        project = rows * normed + max(product(3 * inner * C, qkv), qkv + product(gated * inner * C, gate))
    op = 0 if tiles is None else _sparse_op(tiles, config, gated) + (_GATHERED if eager else 0)
    # rows that attend to everything are written where torch puts them, then over their queries
    op += min(heads_wide, RESULT_BYTES) if dense else (tokens - video_tokens) * inner * element
    attention = stream + max(project, qkv + gate + op, qkv + product(inner * C, stream))
    # swiglu writes over its value, in fp8 beside it, and both halves are then gone
    halves, hidden = 2 * rows * ffn * element, rows * ffn
    swiglu, hidden = (halves + hidden, hidden) if fp8 else (halves, halves)
    projected = hidden + product(ffn * C, rows * C * element)
    feed_forward = stream + tokens * normed + max(product(2 * ffn * C, halves), swiglu, projected)
    time_rows = 4 if conditions else 2
    return RunBytes(
        tables=config.num_layers * forwards * time_rows * BLOCK_ROWS * C * element,
        request=(
            tokens * 2 * 3 * config.rope_freq_dim * element
            + tokens * 2 * 8
            + 6 * video_tokens * config.in_channels * PATCH * PATCH * 4
            + text_tokens * (C + config.text_dim) * element
        ),
        attention=attention,
        feed_forward=feed_forward,
    )


def _sparse_op(tiles: Tiles, config: DiTConfig, gated: bool) -> int:
    """Means of q, k and v, and of as many heads as go at a time scores, lists and coarse vectors."""
    N, H, D = tiles.total, config.num_heads, config.head_dim
    group = max(1, min(H, SCORE_BYTES // (4 * N * N)))
    means = (2 + gated) * H * N * D * 4
    scores = group * (N if gated else tiles.video) * N * 4
    lists = group * tiles.video * tiles.parts * (tiles.prefix + tiles.kept) * tiles.parts * 4
    return means + scores + lists + gated * group * N * D * 4
