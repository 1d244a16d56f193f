"""ComfyUI's CONDITIONING of MiniMax-H3 to what the core takes. The only file that knows the keys of those dicts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..fasth3_core.errors import ContractError, GeometryError
from ..fasth3_core.packing.layout import Keyframe, Reference
from ..fasth3_core.sampling.noise import VISUAL_CONDITION_TIME
from ._latents import AUDIO_CHANNELS, VIDEO_CHANNELS

TOKEN_TAGS = "minimax_token_tags"
KEYFRAMES = "minimax_keyframes"
REFERENCES = "minimax_refs"
_VISUAL_TIME = "minimax_visual_cond_noise_aug"
_AUDIO_TIME = "minimax_audio_cond_noise_aug"

# what other nodes add to steer their samplers; a distilled forward has no place for any of it
_REFUSED = {
    "mask": "a mask", "area": "an area", "strength": "a strength", "hooks": "hooks", "control": "a ControlNet",
    "gligen": "GLIGEN boxes", "start_percent": "a time range", "end_percent": "a time range",
    "clip_start_percent": "a prompt schedule", "concat_latent_image": "an image to concatenate",
}


@dataclass(frozen=True)
class Prompt:
    """One encoded prompt with its conditions, checked."""

    text_states: torch.Tensor
    """[1, L, D]"""
    token_tags: torch.Tensor
    """[L] int64: 1 text, 0 picture placeholder."""
    keyframes: tuple[Keyframe, ...] = ()
    references: tuple[Reference, ...] = ()


def read(conditioning: Any, text_dim: int | None = None) -> Prompt:
    """Check a CONDITIONING and take it apart.

    Args:
        text_dim: width that the model reads; None does not check it.

    Raises:
        ContractError: not the output of a MiniMax-H3 text encoder, or it carries what FastH3 cannot honour.
    """
    text_states, extra = _single_entry(conditioning)
    length, width = text_states.shape[1:]
    if text_dim is not None and width != text_dim:
        raise ContractError(
            f"the prompt's embeddings are {width} wide, this model reads {text_dim}. Encode it with the MiniMax-H3 "
            "text encoder (CLIPLoader, type 'minimax')."
        )
    if not torch.isfinite(text_states.float()).all():
        raise ContractError("the prompt's embeddings are not finite numbers: the text encoder or its dtype is broken.")
    for key, what in _REFUSED.items():
        value = extra.get(key)
        if value is not None and not (key == "strength" and value == 1.0):
            raise ContractError(f"the conditioning carries {what} ({key}), which FastH3 ignores. Remove that node.")
    for key, distilled in ((_VISUAL_TIME, VISUAL_CONDITION_TIME), (_AUDIO_TIME, 1.0)):
        value = extra.get(key)
        if value is not None and float(value) != distilled:
            raise ContractError(f"the conditioning sets {key} to {value}; FastH3 runs conditions at {distilled} only.")
    keyframes = tuple(_keyframe(i, entry) for i, entry in enumerate(_entries(extra, KEYFRAMES)))
    references = tuple(_reference(i, entry) for i, entry in enumerate(_entries(extra, REFERENCES)))
    return Prompt(text_states, _tags(extra, length, bool(keyframes or references)), keyframes, references)


def write(prompt: Prompt) -> list[list[Any]]:
    """The CONDITIONING that `read` takes apart, in the form of ComfyUI's own nodes."""
    extra: dict[str, Any] = {"pooled_output": None, TOKEN_TAGS: prompt.token_tags}
    if prompt.keyframes:
        extra[KEYFRAMES] = [_keyframe_entry(keyframe) for keyframe in prompt.keyframes]
    if prompt.references:
        extra[REFERENCES] = [_reference_entry(reference) for reference in prompt.references]
    return [[prompt.text_states, extra]]


def check_free(conditioning: Any, frames: Iterable[int]) -> None:
    """Raise ContractError if the conditioning is no single prompt, or has a keyframe at one of these frames."""
    present = {entry.get("resolved_frame_index") for entry in _entries(_single_entry(conditioning)[1], KEYFRAMES)}
    if taken := present.intersection(frames):
        raise ContractError(f"the conditioning has a keyframe at frame {min(taken)} already. Leave one of them out.")


def with_keyframes(conditioning: Any, latents: dict[int, torch.Tensor]) -> list[list[Any]]:
    """The conditioning with more keyframes, normalised latents [1, 24, t, h, w] by frame."""
    added = [_keyframe_entry(Keyframe(latent=latent, frame=frame)) for frame, latent in latents.items()]
    return _with_more(conditioning, KEYFRAMES, added)


def reference_kinds(conditioning: Any) -> list[str]:
    """Kinds of the references that a conditioning has, in order."""
    return [str(entry.get("kind")) for entry in _entries(_single_entry(conditioning)[1], REFERENCES)]


def with_references(conditioning: Any, references: Iterable[Reference]) -> list[list[Any]]:
    """The conditioning with more references, behind those that it has."""
    return _with_more(conditioning, REFERENCES, [_reference_entry(reference) for reference in references])


def _with_more(conditioning: Any, key: str, entries: list[dict[str, Any]]) -> list[list[Any]]:
    """A new conditioning: the given one may be in ComfyUI's cache."""
    text_states, extra = _single_entry(conditioning)
    tags = extra.get(TOKEN_TAGS, torch.ones(text_states.shape[1], dtype=torch.int64, device="cpu"))
    return [[text_states, {**extra, TOKEN_TAGS: tags, key: [*_entries(extra, key), *entries]}]]


def _single_entry(conditioning: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    entries = conditioning if isinstance(conditioning, (list, tuple)) else []
    well_formed = all(
        isinstance(e, (list, tuple)) and len(e) == 2 and isinstance(e[0], torch.Tensor) and isinstance(e[1], dict)
        for e in entries
    )
    if not entries or not well_formed:
        raise ContractError("the conditioning is no list of [embeddings, settings], or empty. Connect a text encoder.")
    if len(entries) > 1:
        raise ContractError(
            f"the conditioning has {len(entries)} entries (combined or scheduled prompts): the packed sequence holds "
            "one prompt. Connect a single text encode node."
        )
    text_states, extra = entries[0]
    if text_states.ndim != 3 or text_states.shape[0] != 1 or text_states.shape[1] < 1:
        raise ContractError(
            f"the prompt's embeddings have the shape {list(text_states.shape)}, expected [1, tokens, width] with at "
            "least one token and batch 1."
        )
    return text_states, extra


def _entries(extra: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = extra.get(key) or []
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, dict) for entry in entries):
        raise ContractError(f"conditioning key {key!r} must be a list of dicts; another version of ComfyUI wrote it?")
    return list(entries)


def _tags(extra: dict[str, Any], length: int, has_pictures: bool) -> torch.Tensor:
    tags = extra.get(TOKEN_TAGS)
    if tags is None:
        if has_pictures:
            raise ContractError(
                f"the conditioning has pictures but no {TOKEN_TAGS}: which tokens stand for them is unknown. "
                "Encode it with the MiniMax-H3 text encoder (CLIPLoader, type 'minimax')."
            )
        return torch.ones(length, dtype=torch.int64, device="cpu")
    tags = torch.as_tensor(tags).reshape(-1).to("cpu", torch.int64)
    if tags.numel() != length:
        raise ContractError(f"the prompt has {length} tokens but {tags.numel()} token tags: not from one encode.")
    if bad := sorted(set(tags.tolist()) - {0, 1}):
        raise ContractError(f"token tags must be 1 (text) or 0 (picture), got {bad}.")
    return tags


def _tensor(entry: dict[str, Any], key: str, where: str, shape: tuple[int | None, ...]) -> torch.Tensor | None:
    """The entry's tensor with the given shape (None: any size), or None if the entry has none."""
    value = entry.get(key)
    if value is None:
        return None
    fits = isinstance(value, torch.Tensor) and value.ndim == len(shape) and all(
        want is None or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        want = ["any" if size is None else size for size in shape]
        raise ContractError(f"{where}: {key} is {got}, expected a tensor of shape {want}.")
    return value


def _video_latent(entry: dict[str, Any], where: str) -> torch.Tensor | None:
    return _tensor(entry, "latent", where, (1, VIDEO_CHANNELS, None, None, None))


def _audio_latent(entry: dict[str, Any], where: str) -> torch.Tensor | None:
    return _tensor(entry, "audio_latent", where, (1, AUDIO_CHANNELS, 2, None))


def _keyframe(index: int, entry: dict[str, Any]) -> Keyframe:
    where = f"keyframe {index}"
    frame = entry.get("resolved_frame_index")
    if not isinstance(frame, int) or isinstance(frame, bool) or frame < 0:
        raise ContractError(f"{where}: resolved_frame_index is {frame!r}, expected a frame number from 0.")
    latent, audio_latent = _video_latent(entry, where), _audio_latent(entry, where)
    if latent is None and audio_latent is None:
        raise ContractError(f"{where} at frame {frame} has neither a latent nor an audio_latent.")
    return Keyframe(frame=frame, latent=latent, audio_latent=audio_latent)


def _keyframe_entry(keyframe: Keyframe) -> dict[str, Any]:
    entry: dict[str, Any] = {"resolved_frame_index": keyframe.frame}
    if keyframe.latent is not None:
        entry["latent"] = keyframe.latent
    if keyframe.audio_latent is not None:
        entry["audio_latent"] = keyframe.audio_latent
    return entry


def _reference(index: int, entry: dict[str, Any]) -> Reference:
    where = f"reference {index}"
    latent, audio_latent = _video_latent(entry, where), _audio_latent(entry, where)
    declared = {"latent_t": 2, "latent_h": 3, "latent_w": 4}
    for key, axis in declared.items() if latent is not None else ():
        if entry.get(key, latent.shape[axis]) != latent.shape[axis]:
            raise GeometryError(f"{where}: {key} says {entry[key]}, its latent has {latent.shape[axis]}.")
    if audio_latent is not None and entry.get("ref_audio_t", audio_latent.shape[3]) != audio_latent.shape[3]:
        raise GeometryError(
            f"{where}: ref_audio_t says {entry['ref_audio_t']}, its audio_latent has {audio_latent.shape[3]}."
        )
    return Reference(kind=str(entry.get("kind")), latent=latent, audio_latent=audio_latent)


def _reference_entry(reference: Reference) -> dict[str, Any]:
    """With the sizes that ComfyUI's packing reads, and without a key for what there is not."""
    entry: dict[str, Any] = {"kind": reference.kind}
    if reference.latent is not None:
        t, h, w = reference.latent.shape[2:]
        entry |= {"latent_t": t, "latent_h": h, "latent_w": w, "latent": reference.latent}
    if reference.kind != "image":
        entry["ref_audio_t"] = 0 if reference.audio_latent is None else reference.audio_latent.shape[3]
    if reference.audio_latent is not None:
        entry["audio_latent"] = reference.audio_latent
    return entry
