"""Recorded transformer requests, in every layout of the weights, as the model takes them."""

from dataclasses import dataclass

import torch

from ..checkpoint.names import to_canonical
from ..config import DiTConfig, VSAConfig
from ..packing.layout import Keyframe, PackedLayout, Reference, build_layout
from ..packing.positions import frames_in
from ..packing.rows import pack_audio, patchify
from ..sampling.noise import VISUAL_CONDITION_TIME
from ..weights.policy import cast
from ..weights.tensors import TensorStore
from .golden import Golden, Target

STREAMS = ("video", "audio")


@dataclass(frozen=True)
class RecordedRequest:
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


def diffusers_case(golden: Golden, target: Target) -> RecordedRequest:
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
    return RecordedRequest(
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


def single_file_case(golden: Golden, target: Target) -> RecordedRequest:
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
    return RecordedRequest(
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
