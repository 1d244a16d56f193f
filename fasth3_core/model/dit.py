"""The transformer's forward, split into what a request computes once and what every step computes.

Tokens are kept in tile order throughout (the plan's order; packed order for dense attention): the prefix is the same in
both, the target video is permuted once, on entry, and its rows stay permuted until the sampler unpacks them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels.segments import Segments
from ..packing.layout import PackedLayout
from . import blocks
from .handle import WeightStore
from .head_bank import Bank, Heads, heads_of_steps
from .linear import linear
from .ops import TokenOps
from .time import NUM_MODALITIES, adaln_features, block_table, final_table

_RUN_AHEAD = 2
"""Blocks that the host may queue ahead of the device, so that an interrupt takes effect within blocks, not minutes."""

_OUT_ROWS = 16384
"""Tokens a pass through the output norm, which is fp32."""

AttendAt = Callable[[int, int], blocks.Attend]
"""(step, block) -> the attention that this block runs."""


@dataclass(frozen=True)
class StepRows:
    """Which AdaLN rows modulate which tokens at one step."""

    times: torch.Tensor
    """[M] fp32, the distinct clean times of the step, ascending."""
    segments: tuple[tuple[int, int, int], ...]
    """(start, stop, 3 x time row + tag), covering [0, S)."""
    audio_row: int
    video_row: int
    """Rows of `times` for the two targets; the output norm knows no modality."""


def step_rows(layout: PackedLayout, time_video: float, time_audio: float, condition_time: float) -> StepRows:
    """Times are fp32 values; equal ones share a row, so the first step of a plain request has a single one."""
    clocks = {
        "video": time_video,
        "audio": time_audio,
        "condition": max(time_video, condition_time),
        "clean": 1.0,
    }
    used = torch.tensor([clocks[s.clock] for s in layout.segments], dtype=torch.float32, device="cpu")
    times, rows = torch.unique(used, return_inverse=True)
    segments = tuple(
        (s.start, s.stop, NUM_MODALITIES * row + s.tag)
        for s, row in zip(layout.segments, rows.tolist(), strict=True)
    )
    return StepRows(times, segments, audio_row=rows[-2].item(), video_row=rows[-1].item())


@dataclass(frozen=True)
class Prepared:
    """Everything of a request that does not change from step to step."""

    layout: PackedLayout
    ops: TokenOps
    text: torch.Tensor
    """[L, C] refined text tokens."""
    conditions: tuple[torch.Tensor, ...]
    """Embedded condition rows, one tensor for each of `layout.conditions`."""
    rope: blocks.Rope
    steps: tuple[StepRows, ...]
    tables: tuple[tuple[torch.Tensor, ...], ...]
    """[block][step] -> [3 M, 6, C]."""
    final: tuple[torch.Tensor, ...]
    """[step] -> [M, 2, C]."""
    heads: tuple[Heads, ...]
    """[step] -> output projections."""
    gated: tuple[bool, ...]
    """Per block: whether its gate projection runs. A gate of zeros contributes nothing and is skipped."""


def prepare(
    store: WeightStore,
    layout: PackedLayout,
    order: torch.Tensor | None,
    text_states: torch.Tensor,
    condition_rows: Sequence[torch.Tensor],
    steps: Sequence[StepRows],
    device: torch.device,
    ops: TokenOps,
    check_interrupt: Callable[[], None],
    use_gates: bool,
    bank: Bank | None = None,
) -> Prepared:
    """Refine the text, embed the conditions, and build the rotary and all AdaLN tables.

    Args:
        order: [S] position in tile order -> packed row; None keeps the packed order.
        text_states: [L, text_dim].
        condition_rows: fp32 rows, one tensor for each of `layout.conditions`, already mixed with their noise.
        ops: what `resolve_token_ops` decided for this run.
        use_gates: whether the attention takes a gate; a model without gates has none to give.
        bank: of a student with several output heads.
    """
    config, top = store.config, store.top()
    dtype = store.dtype
    with store.text() as refiner:
        text = blocks.refine_text(refiner, config, ops, text_states.to(device, dtype))
    conditions = tuple(
        _embed(top, rows.to(device), "audio" if segment.clock == "clean" else "video", dtype)
        for segment, rows in zip(layout.conditions, condition_rows, strict=True)
    )
    inv_freq = top.get("rope.inv_freq")
    if inv_freq is None:
        inv_freq = blocks.inverse_frequencies(config.rope_freq_dim).to(device)
    positions = layout.position_ids if order is None else layout.position_ids[order.cpu()]
    features = [adaln_features(top, config, step.times.to(device)) for step in steps]

    def tables_of_block(weights: blocks.Weights) -> tuple[torch.Tensor, ...]:
        check_interrupt()
        return tuple(block_table(f, weights, dtype) for f in features)

    tables = store.block_tables(tuple(tuple(step.times.tolist()) for step in steps), tables_of_block)
    return Prepared(
        layout=layout,
        ops=ops,
        text=text,
        conditions=conditions,
        rope=blocks.rope_table(positions, inv_freq, dtype),
        steps=tuple(steps),
        tables=tables,
        final=tuple(final_table(f, top) for f in features),
        heads=heads_of_steps(top, bank, store.head_form, len(steps)),
        gated=store.gated() if use_gates else (False,) * config.num_layers,
    )


def velocity(
    store: WeightStore,
    prepared: Prepared,
    step: int,
    video_rows: torch.Tensor,
    audio_rows: torch.Tensor,
    attend_at: AttendAt,
    check_interrupt: Callable[[], None],
    after_block: Callable[[torch.Tensor], None] = lambda x: None,
    pass_rows: int = blocks.PASS_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward: data-ward velocities (clean - noise) of both targets, fp32, shaped like the rows given.

    Args:
        video_rows: [Nv, 96] fp32, in tile order.
        audio_rows: [2A, 32] fp32.
        after_block: sees the residual stream [S, C] after each block.
        pass_rows: see `blocks.main_block`.
    """
    config, layout, ops = store.config, prepared.layout, prepared.ops
    x = _pack(store, prepared, video_rows, audio_rows)
    rows = prepared.steps[step]
    segments = Segments.of(rows.segments, x.device)
    pace = _Pace(x.device)
    for i in range(config.num_layers):
        check_interrupt()
        with store.use(i) as weights:
            blocks.main_block(
                x, weights, config, ops, prepared.tables[i][step], segments, prepared.rope,
                attend_at(step, i), prepared.gated[i], check_interrupt, pass_rows,
            )
        after_block(x)
        pace.wait()
    top, final = store.top(), prepared.final[step]
    norm, heads = top["final_layer.norm.weight"], prepared.heads[step]
    v_video = _head(x[layout.video.start :], norm, final[rows.video_row], heads["video"])
    v_audio = _head(x[layout.audio.start : layout.audio.stop], norm, final[rows.audio_row], heads["audio"])
    return v_video, v_audio


def _pack(store: WeightStore, prepared: Prepared, video_rows: torch.Tensor, audio_rows: torch.Tensor) -> torch.Tensor:
    layout, top = prepared.layout, store.top()
    x = torch.empty(layout.num_tokens, store.config.hidden_size, dtype=store.dtype, device=video_rows.device)
    x[: prepared.text.shape[0]] = prepared.text
    for segment, rows in zip(layout.conditions, prepared.conditions, strict=True):
        x[segment.start : segment.stop] = rows
    x[layout.audio.start : layout.audio.stop] = _embed(top, audio_rows, "audio", store.dtype)
    x[layout.video.start :] = _embed(top, video_rows, "video", store.dtype)
    return x


def _embed(top: blocks.Weights, rows: torch.Tensor, stream: str, dtype: torch.dtype) -> torch.Tensor:
    """fp32 projection of latent rows, rounded to the hidden dtype afterwards."""
    weight, bias = top[f"{stream}_patch_proj.weight"], top[f"{stream}_patch_proj.bias"]
    return linear(rows.float(), weight, bias).to(dtype)


def _head(
    x: torch.Tensor, norm: torch.Tensor, table: torch.Tensor, head: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Output norm and head of one target, fp32."""
    shift, scale = table.float()
    weight, bias = head
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], _OUT_ROWS):
        normed = F.rms_norm(x[start : start + _OUT_ROWS], norm.shape, norm, blocks.EPS).float()
        out[start : start + _OUT_ROWS] = linear(torch.addcmul(shift, normed, 1.0 + scale), weight, bias)
    return out


class _Pace:
    """Keeps the host at most _RUN_AHEAD blocks ahead of a CUDA device; nothing to do elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._events: deque[torch.cuda.Event] | None = deque() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._events is None:
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > _RUN_AHEAD:
            self._events.popleft().synchronize()
