"""From a run's settings and geometry to its report."""

from pathlib import Path

import torch

from ..model.handle import H3Model
from ..packing.geometry import LATENT_PIXELS
from ..packing.layout import PackedLayout
from ..report.environment import environment
from ..report.run_report import RunReport, StepReport
from ..vsa.tiles import TilePlan
from .request import Request
from .settings import RunSettings


def step_report(
    i: int, settings: RunSettings, plan: TilePlan | None, num_layers: int, seconds: float
) -> StepReport:
    kept = [] if plan is None else [settings.vsa.kept_tiles(plan.num_video_tiles, i, n) for n in range(num_layers)]
    sparse = [k for k in kept if k < plan.num_video_tiles]
    return StepReport(
        index=i,
        sigma_video=settings.video.sigmas[i].item(),
        sigma_audio=settings.audio.sigmas[i].item(),
        sparse_blocks=len(sparse),
        dense_blocks=num_layers - len(sparse),
        kept_tiles=sparse[0] if sparse else plan.num_video_tiles if plan else 0,
        seconds=seconds,
    )


def new_report(
    model: H3Model,
    request: Request,
    layout: PackedLayout,
    plan: TilePlan | None,
    settings: RunSettings,
    warnings: list[str],
    dtype: torch.dtype,
    device: torch.device,
) -> RunReport:
    contract = model.contract
    return RunReport(
        model={
            # a report travels inside the video: the file and its folder, not where they lie on this machine
            "source": "/".join(Path(model.source).parts[-2:]),
            "blocks": model.config.num_layers,
            "adaln": model.config.adaln,
            "dtype": str(dtype).removeprefix("torch."),
            **model.details,
        },
        contract={
            "name": contract.name,
            "about": contract.about,
            "forwards": settings.video.num_forwards,
            "shift_video": contract.shift_video,
            "shift_audio": contract.shift_audio,
            "sparsity": contract.sparsity,
            "tile_size": contract.tile_size,
        },
        departures=[*model.departures, *settings.departures, *request.departures()],
        warnings=warnings,
        geometry={
            "width": request.latent_width * LATENT_PIXELS,
            "height": request.latent_height * LATENT_PIXELS,
            "frames": request.frames,
            "tokens": layout.num_tokens,
            "text_tokens": layout.prefix[0],
            "condition_tokens": layout.prefix[1],
            "audio_tokens": layout.prefix[2],
            "task": request.task,
            "seed": request.seed,
        },
        attention={}
        if plan is None
        else {
            "tile_size": settings.vsa.tile_size,
            "mode": settings.vsa.mode,
            "keep_rule": settings.vsa.keep_rule,
            "prefix_tiles": plan.num_prefix_tiles,
            "video_tiles": plan.num_video_tiles,
        },
        environment=environment(device),
    )
