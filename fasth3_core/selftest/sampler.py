"""The sampler and its grids against recorded truth."""

import re
from collections.abc import Iterator
from itertools import product

import torch

from ...kernels.registry import BackendUnavailable
from ..config import VSAConfig
from ..contracts import Contract
from ..errors import CheckpointError
from ..model.handle import H3Model
from ..sampling import schedule
from ..sampling.loop import sample
from ..sampling.request import Request
from .golden import Golden, Row, Target
from .plain import plain_vsa
from .recorded import STREAMS, diffusers_case
from .vsa import vsa_backends


def verify_sampler(golden: Golden, target: Target) -> Iterator[Row]:
    """The whole loop from given noise; every step is rebuilt from the clean estimates that the loop reports."""
    weights = golden.other()
    case = diffusers_case(weights, target)
    video, audio = schedule.explicit(golden.tensor("sigmas.video")), schedule.explicit(golden.tensor("sigmas.audio"))
    for name, grid in (("video", video), ("audio", audio)):
        recorded = golden.tensor(f"timesteps.{name}")
        yield target.row(golden, f"timesteps {name}", "mismatches", grid.timesteps, recorded, 0)
    init = golden.tensor("init.video"), golden.tensor("init.audio").permute(1, 0, 2)[None]
    shift_video, shift_audio = golden.meta["shifts"]
    contract = Contract(
        name="recorded", points=len(video.sigmas), shift_video=shift_video, shift_audio=shift_audio,
        sparsity=golden.meta["sparsity"], tile_size=case.vsa.tile_size, tasks=("t2va",), about="recorded",
    )
    model = H3Model(case.store.config, contract, case.store, golden.path.name)
    request = Request(
        text_states=case.text[None],
        token_tags=case.layout.token_tags[: case.layout.prefix[0]],
        latent_frames=init[0].shape[2],
        latent_height=init[0].shape[3],
        latent_width=init[0].shape[4],
        audio_latents=init[1].shape[-1],
        noise=init,
    )
    runs = {}
    names = vsa_backends(target)
    for backend in names if target.exact else (*names, "plain"):
        estimates: list[tuple[torch.Tensor, torch.Tensor]] = []
        config = VSAConfig(mode=case.vsa.mode, backend="eager" if backend == "plain" else backend)
        try:
            sample(
                model, request, device=target.device, vsa=config, schedules=(video, audio),
                on_step=lambda i, n, *x0, kept=estimates: kept.append(x0),
                attend=plain_vsa if backend == "plain" else None,
            )
        except BackendUnavailable as error:
            for i, name in product(range(video.num_forwards), STREAMS):
                yield target.unavailable(golden, f"step {i} {name}", backend, str(error))
            continue
        runs[backend] = [
            _rebuild([x0[stream].cpu() for x0 in estimates], init[stream], grid)
            for stream, grid in ((0, video), (1, audio))
        ]
    for backend in names:
        if backend not in runs:
            continue
        for i in range(video.num_forwards):
            for stream, name in enumerate(STREAMS):
                truth = golden.tensor(f"step{i}.{name}")
                truth = truth if name == "video" else truth.permute(1, 0, 2)[None]
                plain = runs["plain"][stream][i] if "plain" in runs else None
                out = runs[backend][stream][i]
                yield target.row(golden, f"step {i} {name}", "of max", out, truth, 5e-6, backend=backend, plain=plain)


def _rebuild(estimates: list[torch.Tensor], x: torch.Tensor, grid: schedule.Schedule) -> list[torch.Tensor]:
    out = []
    for i, x0 in enumerate(estimates):
        ratio = (grid.sigmas[i + 1] / grid.sigmas[i]).item()
        x = ratio * x + (1 - ratio) * x0
        out.append(x)
    return out


def verify_sigmas(golden_path, recorded: dict[str, list[float]], rungs: dict[str, tuple[int, ...]]) -> Iterator[Row]:
    """`sigmas.json`: names are shift<s>_n<points> or shift<s>_rungs_<ladder>."""
    for name, values in recorded.items():
        match = re.fullmatch(r"shift([\d.]+)_(?:n(\d+)|rungs_(\w+))", name)
        if not match or (match[3] and match[3] not in rungs):
            ladders = ", ".join(rungs)
            raise CheckpointError(f"{golden_path}: {name!r} is no grid; known are shift<s>_n<points> and "
                                  f"shift<s>_rungs_<ladder> with the ladders {ladders}.")
        base = schedule.rungs_base(rungs[match[3]]) if match[3] else schedule.uniform_base(int(match[2]))
        sigmas = schedule.shifted(base, float(match[1])).sigmas.tolist()
        wrong = float(sum(a != b for a, b in zip(sigmas, values, strict=False)) + abs(len(sigmas) - len(values)))
        yield Row(golden_path.name, name, "torch", "float32", "mismatches", wrong, 0.0)
