"""A prompt as the text encoder sees it: labels, pictures, two frames a second of videos, then the text."""

from collections.abc import Sequence
from typing import Any

import torch

from ..fasth3_core.errors import ConfigError, ContractError
from ..fasth3_core.media.references import SEEN_PER_SECOND
from ._conditioning import TOKEN_TAGS
from ._reference_inputs import Wanted

POSITIVE_TEXT = "An encoded prompt, to which they are added. Connect this, or clip."
CLIP_TEXT = "From Load CLIP, type 'minimax': encodes the prompt of this node, and sees the pictures."


def check_source(positive: Any, clip: Any, prompt: str) -> None:
    """Raise ConfigError unless the prompt comes from one of the two."""
    if (positive is None) == (clip is None):
        given = "neither" if clip is None else "both"
        raise ConfigError("positive, clip", given, "one of them", "Connect positive for a prompt that is encoded, or "
                          "clip to encode the prompt of this node.")
    if clip is None and prompt.strip():
        raise ConfigError("prompt", prompt, "no text without clip", "Connect clip instead of positive, or clear it.")


def with_keyframes(clip: Any, prompt: str, pictures: Sequence[torch.Tensor]) -> list[list[Any]]:
    """The CONDITIONING of ComfyUI's MiniMax-H3 text encoder for a prompt with pictures, bytes [1, H, W, 3]."""
    return _encode(clip, prompt, bool(pictures), images=[picture.float() / 255 for picture in pictures])


def with_references(
    clip: Any, prompt: str, wanted: Sequence[Wanted], frames: Sequence[torch.Tensor | None]
) -> list[list[Any]]:
    """The same with references, of each of which `frames` are shown, bytes [n, H, W, 3], or None of a sound."""
    items: list[dict[str, Any]] = []
    for each, frames_FHWC in zip(wanted, frames, strict=True):
        if each.wave is not None:
            items.append({"type": "audio"})
        if frames_FHWC is not None:
            shown = {"type": "image" if each.kind == "image" else "video", "data": frames_FHWC.float() / 255}
            if each.kind != "image":
                shown["timestamps"] = [i / SEEN_PER_SECOND for i in range(len(frames_FHWC))]
            items.append(shown)
    return _encode(clip, prompt, any(each is not None for each in frames), minimax_ref_items=items)


def _encode(clip: Any, prompt: str, sees: bool, **beside: list[Any]) -> list[list[Any]]:
    """In the form in which ComfyUI's own H3 nodes ask for it.

    Raises ContractError if it is another text encoder, or has not seen what it should.
    """
    conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(prompt, **beside))
    tags = conditioning[0][1].get(TOKEN_TAGS)
    if tags is None:
        raise ContractError("clip is no MiniMax-H3 text encoder. Load one with CLIPLoader, type 'minimax'.")
    if sees and bool(torch.as_tensor(tags).all()):
        raise ContractError(
            "the text encoder has not seen the pictures: this version of ComfyUI passes them otherwise. Encode the "
            "prompt with its own MiniMax H3 node, and connect that as positive."
        )
    return conditioning
