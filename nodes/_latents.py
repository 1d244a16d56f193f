"""ComfyUI's LATENT of MiniMax-H3 (video and audio in one nested tensor) to plain tensors and back.

Both streams are normalised latents at their own scale, as the stock sampler returns them and the stock VAE nodes take
them: video [1, 24, T, H/16, W/16], audio [1, 32, 2, A].
"""

from typing import Any

import torch

from ..fasth3_core.config import PATCH
from ..fasth3_core.errors import ContractError, GeometryError
from ..fasth3_core.packing.geometry import LATENT_PIXELS, audio_latents, frames_of_latents
from . import _host

VIDEO_CHANNELS = 24
AUDIO_CHANNELS = 32


def join(video: torch.Tensor, audio: torch.Tensor) -> dict[str, Any]:
    """Plain tensors -> LATENT, on the CPU."""
    return {"samples": _host.get().nested((video.cpu(), audio.cpu()))}


def split(latent: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """LATENT -> (video, audio), checked.

    Raises:
        ContractError: not a MiniMax-H3 latent: no or one stream only, other channels, a mask.
        GeometryError: more than one video, a length that is no clip, or sound of another length.
    """
    samples = latent.get("samples")
    if not hasattr(samples, "shape") and not getattr(samples, "is_nested", False):
        raise ContractError(f"the latent holds {type(samples).__name__}, expected video and audio streams.")
    if not getattr(samples, "is_nested", False):
        raise ContractError(
            f"the latent has one stream {list(samples.shape)}: FastH3 needs video and audio together. "
            "Use FastH3 Empty Latent, or a MiniMax H3 node; a node between may have dropped the audio."
        )
    streams = list(samples.unbind())
    if len(streams) != 2 or streams[0].ndim != 5 or streams[1].ndim != 4:
        raise ContractError(
            f"the latent has the streams {[list(s.shape) for s in streams]}, expected video "
            f"[1, {VIDEO_CHANNELS}, T, h, w] and audio [1, {AUDIO_CHANNELS}, 2, A]."
        )
    video, audio = streams
    if video.shape[1] != VIDEO_CHANNELS or tuple(audio.shape[1:3]) != (AUDIO_CHANNELS, 2):
        raise ContractError(
            f"the latent is of another model: video {list(video.shape)}, audio {list(audio.shape)}; MiniMax-H3 has "
            f"{VIDEO_CHANNELS} video channels and {AUDIO_CHANNELS} x 2 audio channels."
        )
    if video.shape[0] != 1 or audio.shape[0] != 1:
        raise GeometryError(
            f"a batch of {video.shape[0]} videos: the packed sequence holds one. Queue several seeds instead."
        )
    if latent.get("noise_mask") is not None:
        raise ContractError("the latent carries a noise mask, which FastH3 was not distilled for. Remove that node.")
    expected = audio_latents(frames_of_latents(video.shape[2]))
    if audio.shape[3] != expected:
        raise GeometryError(
            f"{video.shape[2]} video latents last as long as {expected} audio latents, but there are {audio.shape[3]}."
        )
    height, width = video.shape[3:]
    if height % PATCH or width % PATCH or not height * width:
        raise GeometryError(
            f"a video of {width * LATENT_PIXELS}x{height * LATENT_PIXELS} pixels: both sides must be multiples of 32."
        )
    return video, audio


def empty(latent_frames: int, height: int, width: int, num_audio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero latents of a clip of `height` x `width` pixels, with `num_audio` audio latents a channel."""
    exact = dict(dtype=torch.float32, device="cpu")
    video = torch.zeros(1, VIDEO_CHANNELS, latent_frames, height // LATENT_PIXELS, width // LATENT_PIXELS, **exact)
    return video, torch.zeros(1, AUDIO_CHANNELS, 2, num_audio, **exact)
