"""The transformer and the sampler against recorded truth, in every layout of the weights."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from ...kernels.device import Case
from ...kernels.registry import BackendUnavailable
from ..checkpoint.names import to_canonical
from ..config import DiTConfig, VSAConfig
from ..contracts import Contract
from ..errors import CheckpointError
from ..model import blocks, dit
from ..model.handle import H3Model
from ..model.ops import resolve_token_ops
from ..packing.layout import Keyframe, PackedLayout, Reference, build_layout
from ..packing.positions import frames_in
from ..packing.rows import pack_audio, patchify, unpack_audio, unpatchify
from ..sampling import schedule
from ..sampling.loop import sample
from ..sampling.noise import VISUAL_CONDITION_TIME
from ..sampling.request import Request
from ..vsa.attention import attention as vsa_attention
from ..vsa.attention import resolve_ops
from ..vsa.tiles import tile_plan
from ..weights.policy import cast
from ..weights.tensors import TensorStore
from .golden import Golden, Row, Target
from .plain import plain_vsa
from .vsa import vsa_backends

_STREAMS = ("video", "audio")
_POSITION_TOLERANCE = 1e-9
"""Positions are float64: orders of summation differ by 1e-13, a wrong rule by 1e-2."""


@dataclass(frozen=True)
class _Case:
    """One recorded transformer request. Audio is [1, C, 2, A]."""

    store: TensorStore
    layout: PackedLayout
    text: torch.Tensor
    video: torch.Tensor
    audio: torch.Tensor
    condition_rows: list[torch.Tensor]
    condition_time: float
    sigmas: list[tuple[float, float]]
    vsa: VSAConfig | None


def verify_dit(golden: Golden, target: Target) -> Iterator[Row]:
    case = _diffusers_case(golden, target)
    for name, built in (("position_ids", case.layout.position_ids), ("token_tags", case.layout.token_tags)):
        if (recorded := golden.optional(name)) is not None:
            yield target.row(golden, name, "max abs", built, recorded, _POSITION_TOLERANCE)
    recorded_low = "bfloat16" in golden.meta["dtype"]
    truth = "out{}_fp32.{}" if recorded_low else "out{}.{}"
    recorded = "out{}.{}" if recorded_low and target.dtype == torch.bfloat16 else None
    yield from _compare(golden, target, case, "of max", 5e-6, truth, recorded)


def verify_comfy_dit(golden: Golden, target: Target) -> Iterator[Row]:
    case = _single_file_case(golden, target)
    conditioned = bool(case.condition_rows)
    tolerance = 3e-5 if case.store.config.adaln == "curve" else 1e-6 if conditioned else 2e-6
    yield from _compare(golden, target, case, "rel L2", tolerance, "out{}.{}", None)


def verify_sampler(golden: Golden, target: Target) -> Iterator[Row]:
    """The whole loop from given noise; every step is rebuilt from the clean estimates that the loop reports."""
    weights = golden.other()
    case = _diffusers_case(weights, target)
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
            for i, name in product(range(video.num_forwards), _STREAMS):
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
            for stream, name in enumerate(_STREAMS):
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


def _diffusers_case(golden: Golden, target: Target) -> _Case:
    meta = golden.meta
    audio = golden.tensor("audio").permute(1, 0, 2)[None]
    video = golden.tensor("video")
    T = video.shape[2]
    at = {"first": 0, "last": frames_in(T) - 1}
    keyframes = [Keyframe(at[which], video[:, :, :1]) for which in meta["keyframes"]]
    rows = list(golden.tensor("condition_rows").chunk(len(keyframes))) if keyframes else []
    tags = torch.tensor(meta["text_tags"])
    layout = build_layout(tags, T, *video.shape[3:], audio.shape[-1], keyframes)
    vsa = meta.get("vsa")
    return _Case(
        store=_store(golden, target, "diffusers"),
        layout=layout,
        text=golden.tensor("text")[0],
        video=video,
        audio=audio,
        condition_rows=rows,
        condition_time=VISUAL_CONDITION_TIME,
        sigmas=[tuple(pair) for pair in meta["sigmas"]],
        vsa=None
        if vsa is None
        else VSAConfig(
            keep_rule="sparsity", sparsity=vsa["sparsity"], tile_size=vsa["tile_size"], mode=vsa["mode"]
        ),
    )


def _single_file_case(golden: Golden, target: Target) -> _Case:
    meta = golden.meta
    video, audio, text = (golden.tensor(name) for name in ("video", "audio", "text"))
    tags = golden.optional("text_tags")
    tags = torch.ones(text.shape[1], dtype=torch.int64) if tags is None else tags
    keyframes = [Keyframe(at, golden.tensor(f"keyframe{i}")) for i, at in enumerate(meta.get("keyframe_frames", ()))]
    references = [
        Reference(ref["kind"], golden.optional(f"ref{i}.latent"), golden.optional(f"ref{i}.audio_latent"))
        for i, ref in enumerate(meta.get("references", ()))
    ]
    rows = [patchify(k.latent) for k in keyframes]
    for ref in references:
        rows += [pack_audio(ref.audio_latent)] if ref.audio_latent is not None else []
        rows += [patchify(ref.latent)] if ref.latent is not None else []
    shift_video, shift_audio = meta.get("shifts", (12, 3))
    sigmas = []
    for sigma in meta["sigmas_video"]:
        base = sigma / (shift_video + sigma * (1 - shift_video))
        sigmas.append((sigma, shift_audio * base / (1 + (shift_audio - 1) * base)))
    return _Case(
        store=_store(golden, target, "single-file"),
        layout=build_layout(tags, *video.shape[2:], audio.shape[-1], keyframes, references),
        text=text[0],
        video=video,
        audio=audio,
        condition_rows=rows,
        condition_time=meta.get("condition_time") or VISUAL_CONDITION_TIME,
        sigmas=sigmas,
        vsa=None,
    )


def _store(golden: Golden, target: Target, layout: str) -> TensorStore:
    recorded = golden.other()
    tensors, said = to_canonical(recorded.weights(), layout=layout), recorded.meta.get("config")
    adaln = DiTConfig.from_shapes({name: tuple(t.shape) for name, t in tensors.items()}, said).adaln
    held = {name: cast(name, t, target.dtype, adaln).to(target.device) for name, t in tensors.items()}
    return TensorStore(held, said)


def _compare(
    golden: Golden, target: Target, case: _Case, metric: str, tolerance: float, truth: str, recorded: str | None
) -> Iterator[Row]:
    names = ("torch",) if case.vsa is None else vsa_backends(target)
    plain = None
    if not target.exact and recorded is None:
        plain = _forwards(case, target, "plain")
    for backend in names:
        try:
            outs = _forwards(case, target, backend)
        except BackendUnavailable as error:
            for (sigma, _), name in product(case.sigmas, _STREAMS):
                yield target.unavailable(golden, f"sigma {sigma:g} {name}", backend, str(error))
            continue
        for i, out in enumerate(outs):
            for stream, name in enumerate(_STREAMS):
                def read(pattern: str, i: int = i, name: str = name) -> torch.Tensor:
                    return _audio_layout(golden.tensor(pattern.format(i, name)), name)

                yield target.row(
                    golden, f"sigma {case.sigmas[i][0]:g} {name}", metric, out[stream], read(truth), tolerance,
                    backend=backend,
                    plain=None if plain is None else plain[i][stream],
                    recorded=None if recorded is None else read(recorded),
                )


def _audio_layout(out: torch.Tensor, name: str) -> torch.Tensor:
    return out if name == "video" or out.ndim == 4 else out.permute(1, 0, 2)[None]


def _forwards(case: _Case, target: Target, backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One forward at every recorded pair of sigmas: velocities as latents."""
    config, device = case.store.config, target.device
    kind = Case(device=device, dtype=target.dtype, head_dim=config.head_dim)
    token_ops = resolve_token_ops("eager" if backend == "plain" else backend, kind)
    plan = attend = None
    if case.vsa is not None:
        plan = tile_plan(case.layout.prefix, case.layout.grid, case.vsa.tile_size, device)
        if backend == "plain":
            attend = plain_vsa
        else:
            attend = partial(vsa_attention, ops=resolve_ops(backend, replace(kind, tile_size=plan.tile_size)))

    def attend_at(step: int, layer: int) -> blocks.Attend:
        if attend is None:
            return blocks.dense_attention
        return partial(attend, plan=plan, config=case.vsa, step=step, layer=layer)

    times = torch.tensor([(1 - v, 1 - a) for v, a in case.sigmas], dtype=torch.float64).float().tolist()
    steps = [dit.step_rows(case.layout, tv, ta, case.condition_time) for tv, ta in times]
    start = case.layout.video.start
    rows = patchify(case.video).to(device)
    out = []
    with torch.inference_mode():
        prepared = dit.prepare(
            case.store, case.layout, None if plan is None else plan.order, case.text, case.condition_rows, steps,
            device, token_ops, lambda: None, use_gates=plan is not None,
        )
        if plan is not None:
            rows = rows[plan.order[start:] - start]
        for i in range(len(steps)):
            v_video, v_audio = dit.velocity(
                case.store, prepared, i, rows, pack_audio(case.audio).to(device), attend_at, lambda: None
            )
            if plan is not None:
                v_video = v_video[plan.inverse[start:] - start]
            out.append((unpatchify(v_video, *case.video.shape[2:]), unpack_audio(v_audio)))
    return out
