"""The sampler: one joint forward a step, both streams advanced on their own schedule, and a record of what ran."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...kernels.device import Case
from ...kernels.precision import exact_fp32
from ..config import VSAConfig
from ..errors import FastH3Error
from ..model import blocks, dit
from ..model.handle import H3Model
from ..model.ops import resolve_token_ops
from ..packing.layout import PackedLayout
from ..packing.rows import pack_audio, patchify, unpack_audio, unpatchify
from ..report.run_report import RunReport
from ..vsa.attention import attention as sparse_attention
from ..vsa.attention import resolve_ops
from ..vsa.tiles import TilePlan, tile_plan
from . import schedule
from .noise import Drawn, draw
from .record import new_report, step_report
from .request import Request
from .schedule import Schedule
from .settings import RunSettings, resolve

OnStep = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""(forwards done, forwards in all, clean estimate of the video latent, of the audio latent)"""


@dataclass(frozen=True)
class SampleResult:
    video: torch.Tensor
    """[1, C, T, H, W] fp32 on the CPU, normalised."""
    audio: torch.Tensor
    """[1, C, 2, A] fp32 on the CPU, normalised."""
    report: RunReport


def sample(
    model: H3Model,
    request: Request,
    *,
    device: torch.device | str,
    vsa: VSAConfig | None = None,
    grid: str = "contract",
    shift_video: float = 0.0,
    shift_audio: float = 0.0,
    schedules: tuple[Schedule, Schedule] | None = None,
    attend: Callable[..., torch.Tensor] | None = None,
    pass_rows: int = blocks.PASS_ROWS,
    check_interrupt: Callable[[], None] = lambda: None,
    on_step: OnStep | None = None,
    on_load: Callable[[int, int], None] | None = None,
) -> SampleResult:
    """Sample one request on one device.

    Latents stay fp32 for the whole loop and condition rows are never updated. Everything is checked before any weight
    is read; on an exception nothing of the run stays behind.

    Args:
        vsa: sparse attention settings; None takes the contract's.
        grid, shift_video, shift_audio: see `settings.resolve`.
        schedules: explicit video and audio grids, taken as they are; grid and shifts are then ignored.
        attend: stands in for `vsa.attention.attention`, which it must be callable like; for diagnosis.
        pass_rows: tokens that go through the products of a block together; the plan knows how many fit.
        check_interrupt: called twice a block; raises to stop the run.
        on_step: called after each forward.
        on_load: (bytes done, bytes in all) while weights move to the device.

    Raises:
        FastH3Error: the request does not fit the model (ContractError, GeometryError, ConfigError), or a forward
            returned values that are not finite.
    """
    device = torch.device(device)
    warnings = request.check(model)
    settings = resolve(model, vsa, grid, shift_video, shift_audio, request.task, schedules)
    layout = request.layout()
    dtype = model.store.dtype_on(device)
    if dtype == torch.float16:
        warnings.append("fp16: the residual stream of H3 reaches 1e6, past its range. A run that overflows is stopped.")
    case = Case(device=device, dtype=dtype, head_dim=model.config.head_dim)
    plan = ops = None
    if settings.vsa is not None:
        ops = resolve_ops(settings.vsa.backend, replace(case, tile_size=settings.vsa.tile_size))
        attend = attend or partial(sparse_attention, ops=ops, in_place=True)
        prefix = layout.prefix_runs if settings.bank else layout.prefix
        plan = tile_plan(prefix, layout.grid, settings.vsa.tile_size, device)
    token_ops = resolve_token_ops("auto" if settings.vsa is None else settings.vsa.backend, case)
    report = new_report(model, request, layout, plan, settings, warnings, dtype, device)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode(), exact_fp32(device):
        started = time.perf_counter()
        model.store.materialise(device, on_load, check_interrupt)
        report.seconds["load"] = _lap(started, device)

        started = time.perf_counter()
        drawn = _draw(request, model)
        steps = [
            dit.step_rows(layout, tv.item(), ta.item(), drawn.condition_time)
            for tv, ta in zip(settings.video.timesteps, settings.audio.timesteps, strict=True)
        ]
        order = None if plan is None else plan.order
        prepared = dit.prepare(
            model.store, layout, order, request.text_states[0], drawn.condition_rows, steps, device,
            token_ops, check_interrupt, use_gates=plan is not None, bank=settings.bank,
        )
        report.seconds["prepare"] = _lap(started, device)

        def attend_at(step: int, layer: int) -> blocks.Attend:
            if plan is None:
                return blocks.dense_attention
            return partial(attend, plan=plan, config=settings.vsa, step=step, layer=layer)

        def forward(i: int, x_video: torch.Tensor, x_audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            check_interrupt()
            sums: list[torch.Tensor] = []  # of the residual stream after each block: NaN and infinity stay in them
            v_video, v_audio = dit.velocity(
                model.store, prepared, i, x_video, x_audio, attend_at, check_interrupt,
                after_block=lambda x: sums.append(x.sum(dtype=torch.float32)), pass_rows=pass_rows,
            )
            _check_finite(v_video, v_audio, sums, i, model)
            return v_video, v_audio

        def stepped(i: int, seconds: float, x0_video: torch.Tensor, x0_audio: torch.Tensor) -> None:
            report.steps.append(step_report(i, settings, plan, model.config.num_layers, seconds))
            if on_step is not None:
                on_step(i + 1, settings.video.num_forwards, x0_video, x0_audio)

        started = time.perf_counter()
        video, audio = _denoise(settings, drawn, _VideoRows(request, layout, plan), device, forward, stepped)
        report.seconds["sample"] = _lap(started, device)
    if ops is not None:
        main = ops.block_sparse_attention
        report.attention |= {"backend": main.name, "refused": dict(main.refused), "ops": ops.table()}
    report.token_ops = token_ops.table()
    report.memory["pass_rows"] = pass_rows
    report.weights = dict(model.store.traffic())
    if device.type == "cuda":
        report.memory["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return SampleResult(video, audio, report)


def _denoise(
    settings: RunSettings,
    drawn: Drawn,
    rows: "_VideoRows",
    device: torch.device,
    forward: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    stepped: Callable[[int, float, torch.Tensor, torch.Tensor], None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """From noise to latents, on the CPU.

    Args:
        forward: (step, video rows, audio rows) -> their velocities.
        stepped: told (step, its seconds, clean estimate of the video latent, of the audio latent).
    """
    x_video = rows.pack(drawn.video.to(device))
    x_audio = drawn.audio_rows.to(device)
    for i in range(settings.video.num_forwards):
        started = time.perf_counter()
        v_video, v_audio = forward(i, x_video, x_audio)
        x_video, x0_video = schedule.step(x_video, v_video, settings.video, i)
        x_audio, x0_audio = schedule.step(x_audio, v_audio, settings.audio, i)
        stepped(i, _lap(started, device), rows.unpack(x0_video), unpack_audio(x0_audio))
    return rows.unpack(x_video).cpu(), unpack_audio(x_audio).cpu()


class _VideoRows:
    """Target video latent <-> rows in the order of the tokens."""

    def __init__(self, request: Request, layout: PackedLayout, plan: TilePlan | None) -> None:
        self._shape = (request.latent_frames, request.latent_height, request.latent_width)
        self._order = self._inverse = None
        if plan is not None:
            start = layout.video.start
            self._order = plan.order[start:] - start
            self._inverse = plan.inverse[start:] - start

    def pack(self, latent: torch.Tensor) -> torch.Tensor:
        rows = patchify(latent)
        return rows if self._order is None else rows[self._order]

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        return unpatchify(rows if self._inverse is None else rows[self._inverse], *self._shape)


def _draw(request: Request, model: H3Model) -> Drawn:
    T, H, W = request.latent_frames, request.latent_height, request.latent_width
    drawn = draw(
        request.seed,
        (1, model.config.in_channels, T, H, W),
        (2 * request.audio_latents, model.config.audio_in_channels),
        request.conditions(),
        request.condition_noise,
    )
    if request.noise is None:
        return drawn
    video, audio = (x.detach().to("cpu", torch.float32) for x in request.noise)
    return replace(drawn, video=video, audio_rows=pack_audio(audio))


def _check_finite(
    v_video: torch.Tensor, v_audio: torch.Tensor, sums: list[torch.Tensor], step: int, model: H3Model
) -> None:
    bad = [name for name, v in (("video", v_video), ("audio", v_audio)) if not bool(torch.isfinite(v).all())]
    if bad:
        finite = torch.stack(sums).isfinite().tolist()
        where = "after the last block" if all(finite) else f"first in block {finite.index(False)}"
        raise FastH3Error(
            f"forward {step + 1} returned NaN or infinity in the {' and '.join(bad)} stream, {where}, in "
            f"{str(model.store.dtype).removeprefix('torch.')}. H3's residual stream exceeds the range of fp16: load "
            "the model with dtype bf16 or fp32; if it is, the checkpoint is damaged."
        )


def _lap(started: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
