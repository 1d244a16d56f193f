"""Clips of the video VAE in time: 17 frames in, 5 latents out; 7 latents in, 28 frames out, 17 + 5 of them used.

Every latent decodes to 4 frames, but the first of each group of 5 stands for one frame, so a clip's first 3 frames
are dropped. The last 5 frames of a clip blend into the first 5 of the next.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..errors import GeometryError

CLIP_FRAMES = 17
CLIP_LATENTS = 5
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
    weights = 1 - torch.arange(OVERLAP_FRAMES, device=body_CFHW.device) / OVERLAP_FRAMES
    body_CFHW[:, :OVERLAP_FRAMES].lerp_(tail_CFHW, weights.to(body_CFHW.dtype)[:, None, None])


def collect(chunks: Iterable[torch.Tensor], out: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Write chunks [1, C, n, H, W], made on `device`, one after the other into out [1, C, F, H, W]; return it."""
    write = _write_lagging if device.type == "cuda" and out.device.type == "cpu" else _write
    done = write(chunks, out, device)
    if done != out.shape[2]:
        raise GeometryError(f"{done} frames were decoded, expected {out.shape[2]}")
    return out


def _write(chunks: Iterable[torch.Tensor], out: torch.Tensor, device: torch.device) -> int:
    done = 0
    for chunk in chunks:
        out[:, :, done : done + chunk.shape[2]].copy_(chunk)
        done += chunk.shape[2]
    return done


def _write_lagging(chunks: Iterable[torch.Tensor], out: torch.Tensor, device: torch.device) -> int:
    """Copy each chunk to the host on a side stream once the next one is launched: the GPU decodes meanwhile."""
    side = torch.cuda.Stream(device)
    pending: list[tuple[torch.Tensor, torch.cuda.Event, int]] = []
    done = 0

    def flush() -> None:
        chunk, ready, start = pending.pop()
        with torch.cuda.stream(side):
            side.wait_event(ready)
            for channel, plane in enumerate(chunk[0]):  # planes are contiguous on both sides: no staging copy
                out[0, channel, start : start + plane.shape[0]].copy_(plane)

    for chunk in chunks:
        ready = torch.cuda.current_stream(device).record_event()
        if pending:
            flush()
        pending.append((chunk, ready, done))
        done += chunk.shape[2]
    if pending:
        flush()
    return done
