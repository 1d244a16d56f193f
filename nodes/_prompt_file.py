"""Encoded prompts on disk, so that a prompt is encoded once and the 14 to 66 GB text encoder need not be there again.

A safetensors file with `text_states` [1, L, D] in its own dtype, `token_tags` [L] int64, and for every keyframe i
`keyframe{i}` (its video latent) and/or `keyframe{i}_audio`, for every reference `reference{i}` and/or
`reference{i}_audio`; metadata `format`, `prompt`, `encoder`, `encoder_hash`, `keyframe_frames` (JSON list of the frame
numbers) and, in the second form, `reference_kinds` (JSON list).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..fasth3_core.atomic import replacing
from ..fasth3_core.errors import CheckpointError, FastH3Error
from ..fasth3_core.packing.layout import Keyframe, Reference
from ._conditioning import Prompt

FORMAT = "fasth3-prompt-1"
FORMAT_WITH_REFERENCES = "fasth3-prompt-2"
"""So that a version which would leave the references out refuses the file."""


def save(path: Path, prompt: Prompt, metadata: Mapping[str, str]) -> None:
    """Write under a temporary name, then rename."""
    tensors = {"text_states": prompt.text_states, "token_tags": prompt.token_tags}
    tensors |= _named("keyframe", prompt.keyframes) | _named("reference", prompt.references)
    described = {**metadata, "format": FORMAT, "keyframe_frames": json.dumps([k.frame for k in prompt.keyframes])}
    if prompt.references:
        kinds = json.dumps([reference.kind for reference in prompt.references])
        described |= {"format": FORMAT_WITH_REFERENCES, "reference_kinds": kinds}
    with replacing(path) as partial:
        # copies: the file has no form for a tensor that two references share
        plain = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        save_file(plain, partial, metadata=described)


def load(path: Path) -> tuple[Prompt, dict[str, str]]:
    """Read a file of `save`: the prompt, and its metadata.

    Raises:
        CheckpointError: truncated, no safetensors file, or not an encoded prompt.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            known = metadata.get("format") in (FORMAT, FORMAT_WITH_REFERENCES)
            if not known or not {"text_states", "token_tags"} <= names:
                raise CheckpointError(
                    f"{path.name} is no prompt file ({metadata.get('format') or 'no format'} instead of {FORMAT}). "
                    "Make one with FastH3 Save Prompt Embeds."
                )

            def latents(name: str) -> list[torch.Tensor | None]:
                found = [file.get_tensor(n) if n in names else None for n in (name, f"{name}_audio")]
                for tensor, dims in zip(found, (5, 4), strict=True):
                    if tensor is not None and tensor.ndim != dims:
                        raise ValueError(f"{name} has the shape {list(tensor.shape)}")
                return found

            frames = enumerate(json.loads(metadata["keyframe_frames"]))
            keyframes = tuple(Keyframe(frame, *latents(f"keyframe{i}")) for i, frame in frames)
            kinds = enumerate(json.loads(metadata.get("reference_kinds", "[]")))
            references = tuple(Reference(kind, *latents(f"reference{i}")) for i, kind in kinds)
            states, tags = file.get_tensor("text_states"), file.get_tensor("token_tags")
            return Prompt(states, tags, keyframes, references), metadata
    except FastH3Error:
        raise
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}. It may be cut short; save it again.") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its list of conditions is damaged ({error!r}). Save it again.") from error


def _named(name: str, conditions: Sequence[Keyframe | Reference]) -> dict[str, torch.Tensor]:
    tensors = {}
    for i, condition in enumerate(conditions):
        tensors |= {f"{name}{i}": condition.latent, f"{name}{i}_audio": condition.audio_latent}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}
