"""The transformer against recorded truth."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from ...kernels.device import Case
from ...kernels.registry import BackendUnavailable
from ..model import blocks, dit
from ..model.ops import resolve_token_ops
from ..packing.rows import pack_audio, patchify, unpack_audio, unpatchify
from ..vsa.attention import attention as vsa_attention
from ..vsa.attention import resolve_ops
from ..vsa.tiles import tile_plan
from .golden import Golden, Row, Target
from .plain import plain_vsa
from .recorded import STREAMS, RecordedRequest, diffusers_case, single_file_case
from .vsa import vsa_backends

_POSITION_TOLERANCE = 1e-9
"""Positions are float64: orders of summation differ by 1e-13, a wrong rule by 1e-2."""


def verify_dit(golden: Golden, target: Target) -> Iterator[Row]:
    case = diffusers_case(golden, target)
    for name, built in (("position_ids", case.layout.position_ids), ("token_tags", case.layout.token_tags)):
        if (recorded := golden.optional(name)) is not None:
            yield target.row(golden, name, "max abs", built, recorded, _POSITION_TOLERANCE)
    recorded_low = "bfloat16" in golden.meta["dtype"]
    truth = "out{}_fp32.{}" if recorded_low else "out{}.{}"
    recorded = "out{}.{}" if recorded_low and target.dtype == torch.bfloat16 else None
    yield from _compare(golden, target, case, "of max", 5e-6, truth, recorded)


def verify_comfy_dit(golden: Golden, target: Target) -> Iterator[Row]:
    case = single_file_case(golden, target)
    conditioned = bool(case.condition_rows)
    tolerance = 3e-5 if case.store.config.adaln == "curve" else 1e-6 if conditioned else 2e-6
    yield from _compare(golden, target, case, "rel L2", tolerance, "out{}.{}", None)


def _compare(
    golden: Golden, target: Target, case: RecordedRequest, metric: str, tolerance: float, truth: str,
    recorded: str | None,
) -> Iterator[Row]:
    names = ("torch",) if case.vsa is None else vsa_backends(target)
    plain = None
    if not target.exact and recorded is None:
        plain = _forwards(case, target, "plain")
    for backend in names:
        try:
            outs = _forwards(case, target, backend)
        except BackendUnavailable as error:
            for (sigma, _), name in product(case.sigmas, STREAMS):
                yield target.unavailable(golden, f"sigma {sigma:g} {name}", backend, str(error))
            continue
        for i, out in enumerate(outs):
            for stream, name in enumerate(STREAMS):
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


def _forwards(case: RecordedRequest, target: Target, backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
