"""A decode that can go on where it stopped: after memory ran out, in smaller batches or on another device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import chunks
from .draft import DraftVAE
from .run import Progress, nothing
from .video import VideoVAE

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""In messages of errors that torch raises as plain RuntimeError: the CPU's allocator, page-locked memory, cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


@dataclass
class Delivery:
    """Hands the frames of one latent on, clip by clip, every clip once, in as many attempts as it takes."""

    latent: torch.Tensor
    """Normalised, [1, 24, T, h, w]."""
    put: Callable[[torch.Tensor, int], None]
    """put(frames [n, H, W, 3] in [0, 1] on the VAE's device, number of the clip)"""
    clips: int = 0
    """Handed on so far."""

    def attempt(
        self,
        vae: VideoVAE | DraftVAE,
        tile_batch: int = 0,
        on_chunk: Progress | None = None,
        check_interrupt: Callable[[], None] = nothing,
    ) -> None:
        """Decode and hand on all that is missing. What an attempt raises leaves the clips handed on counted.

        A later attempt decodes the last clip handed on a second time, for the frames that it blends into the next one:
        on the same device every frame is bitwise that of a decode in one go. A decoder that remembers more than one
        clip (drafts), or reads the place in the video (windows), begins again.
        """
        by_clips = isinstance(vae, VideoVAE) and vae.windows is None
        again = min(1, self.clips) if by_clips else self.clips
        first = self.clips - again
        rest = self.latent[:, :, first * chunks.CLIP_LATENTS :]
        parts = vae.decode_chunks(rest, tile_batch=tile_batch, on_chunk=on_chunk, check_interrupt=check_interrupt)
        for number, part in enumerate(parts):
            if number >= again:
                self.put(part[0].permute(1, 2, 3, 0), first + number)
                self.clips += 1
