"""Encoded prompts on disk, so that a prompt is encoded once and the 14 to 66 GB text encoder need not be there again.

A safetensors file with `text_states` [1, L, D] in its own dtype, `token_tags` [L] int64, and for every keyframe i
`keyframe{i}` (its video latent) and/or `keyframe{i}_audio`; metadata `format`, `prompt`, `encoder`, `encoder_hash` and
`keyframe_frames` (JSON list of the frame numbers).
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..fasth3_core.atomic import replacing
from ..fasth3_core.errors import CheckpointError, ContractError
from ..fasth3_core.packing.layout import Keyframe
from ._conditioning import Prompt

FORMAT = "fasth3-prompt-1"


def save(path: Path, prompt: Prompt, metadata: Mapping[str, str]) -> None:
    """Write under a temporary name, then rename.

    Raises:
        ContractError: the prompt has references, which this form does not hold.
    """
    if prompt.references:
        raise ContractError(
            f"the conditioning has {len(prompt.references)} references; a prompt file holds text and keyframes only."
        )
    tensors = {"text_states": prompt.text_states, "token_tags": prompt.token_tags}
    for i, keyframe in enumerate(prompt.keyframes):
        for name, tensor in ((f"keyframe{i}", keyframe.latent), (f"keyframe{i}_audio", keyframe.audio_latent)):
            if tensor is not None:
                tensors[name] = tensor
    described = {
        **metadata, "format": FORMAT, "keyframe_frames": json.dumps([keyframe.frame for keyframe in prompt.keyframes])
    }
    with replacing(path) as partial:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial, metadata=described)


def load(path: Path) -> tuple[Prompt, dict[str, str]]:
    """Read a file of `save`: the prompt, and its metadata.

    Raises:
        CheckpointError: truncated, no safetensors file, or not an encoded prompt.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            if metadata.get("format") != FORMAT or not {"text_states", "token_tags"} <= names:
                raise CheckpointError(
                    f"{path.name} is no prompt file ({metadata.get('format') or 'no format'} instead of {FORMAT}). "
                    "Make one with FastH3 Save Prompt Embeds."
                )
            keyframes = tuple(
                Keyframe(frame, *(
                    file.get_tensor(name) if name in names else None for name in (f"keyframe{i}", f"keyframe{i}_audio")
                ))
                for i, frame in enumerate(json.loads(metadata["keyframe_frames"]))
            )
            return Prompt(file.get_tensor("text_states"), file.get_tensor("token_tags"), keyframes), metadata
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}. It may be cut short; save it again.") from error
