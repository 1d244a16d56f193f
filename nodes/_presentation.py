"""A prompt as the text encoder sees it beside references: labels, pictures, two frames a second of videos, the text."""

from collections.abc import Sequence
from typing import Any

import torch

from ..fasth3_core.errors import ContractError
from ..fasth3_core.media.references import SEEN_PER_SECOND
from ._conditioning import TOKEN_TAGS
from ._reference_inputs import Wanted


def encode(clip: Any, prompt: str, wanted: Sequence[Wanted], frames: Sequence[torch.Tensor | None]) -> list[list[Any]]:
    """The CONDITIONING of ComfyUI's MiniMax-H3 text encoder, in the form that its own reference node asks for.

    Args:
        clip: a CLIP.
        frames: for each reference what is shown of it, bytes [n, H, W, 3]; None for a sound.

    Raises ContractError if it is another text encoder, or has not seen the pictures.
    """
    conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(prompt, minimax_ref_items=_items(wanted, frames)))
    tags = conditioning[0][1].get(TOKEN_TAGS)
    if tags is None:
        raise ContractError("clip is no MiniMax-H3 text encoder. Load one with CLIPLoader, type 'minimax'.")
    if bool(torch.as_tensor(tags).all()) and any(each is not None for each in frames):
        raise ContractError(
            "the text encoder has not seen the references: this version of ComfyUI passes them otherwise. Encode the "
            "prompt with its own MiniMax H3 node, and connect that as positive."
        )
    return conditioning


def _items(wanted: Sequence[Wanted], frames: Sequence[torch.Tensor | None]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for each, frames_FHWC in zip(wanted, frames, strict=True):
        if each.wave is not None:
            items.append({"type": "audio"})
        if frames_FHWC is not None:
            shown = {"type": "image" if each.kind == "image" else "video", "data": frames_FHWC.float() / 255}
            if each.kind != "image":
                shown["timestamps"] = [i / SEEN_PER_SECOND for i in range(len(frames_FHWC))]
            items.append(shown)
    return items
