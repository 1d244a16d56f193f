"""Clips of the video VAE in time: 17 frames in, 5 latents out; 7 latents in, 28 frames out, 17 + 5 of them used.

Every latent decodes to 4 frames, but the first of each group of 5 stands for one frame, so a clip's first 3 frames
are dropped. The last 5 frames of a clip blend into the first 5 of the next.
"""

from dataclasses import dataclass

import torch

from ..errors import GeometryError
from ..packing.geometry import CLIP_FRAMES, CLIP_LATENTS

OVERLAP_LATENTS = 2
OVERLAP_FRAMES = 5
FRAMES_PER_LATENT = 4
TOKEN_DROP = 3
"""Latents of the last clip that encode only repeated frames and are dropped."""
FRAME_DROP = 3
"""Frames before the one that a clip's first latent stands for."""
DECODED_LATENTS = CLIP_LATENTS + OVERLAP_LATENTS
DECODED_FRAMES = DECODED_LATENTS * FRAMES_PER_LATENT
BODY = slice(FRAME_DROP, FRAME_DROP + CLIP_FRAMES)
TAIL = slice(FRAME_DROP + CLIP_LATENTS * FRAMES_PER_LATENT, DECODED_FRAMES)


@dataclass(frozen=True)
class DecodePlan:
    """How T latents become frames: `pad` copies of the last latent are appended, clip i decodes [5i, 5i + 7)."""

    latents: int
    pad: int
    clips: int
    frames: int


def decode_plan(latents: int) -> DecodePlan:
    """Any T >= 1. Frames are 17k + 5 for T = 5k + 2; other lengths are legal and end inside a group."""
    if latents < 1:
        raise GeometryError(f"{latents} latent frames: nothing to decode")
    pad = -(latents + TOKEN_DROP) % CLIP_LATENTS
    clips = (latents + TOKEN_DROP + pad) // CLIP_LATENTS - 1
    if clips < 1:
        pad, clips = pad + CLIP_LATENTS, 1
    unused = sum(1 if (latents + at) % CLIP_LATENTS == 0 else FRAMES_PER_LATENT for at in range(pad))
    return DecodePlan(latents, pad, clips, CLIP_FRAMES * clips + OVERLAP_FRAMES - unused)


def encode_clips(frames: int) -> int:
    """Clips that F >= 2 frames are encoded in; each sees itself alone. Latents kept: 5 a clip, less the last 3."""
    return -(-frames // CLIP_FRAMES)


def blend_tail(body_CFHW: torch.Tensor, tail_CFHW: torch.Tensor) -> None:
    """Blend the previous clip's last 5 frames into the first 5 of this one, in place, in the tensors' dtype."""
    weights = 1 - torch.arange(OVERLAP_FRAMES, dtype=torch.float32, device=body_CFHW.device) / OVERLAP_FRAMES
    body_CFHW[:, :OVERLAP_FRAMES].lerp_(tail_CFHW, weights.to(body_CFHW.dtype)[:, None, None])
