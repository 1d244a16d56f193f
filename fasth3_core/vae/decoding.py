"""Raw latents to finished frames, clip by clip: 7 latents decode to 28 frames, of which 17 are used and 5 fade into the
next clip. By tiles, the released plan, or by windows over whole frames.
"""

import math
from collections.abc import Callable, Iterator

import torch

from ...kernels import registry
from ...kernels.device import Case
from ...kernels.precision import exact_fp32
from ...kernels.stitch_tiles import Lines
from ..errors import FastH3Error
from . import chunks, latents
from .run import Run
from .tiling import Axis
from .video_decoder import PATCH, ViTDecoder
from .windows import Span, WindowOptions

MakeClip = Callable[
    [torch.Tensor, int, int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]
"""(raw latents [7, h, w, 24], number of the first, frames wanted, tail of the clip before) -> pixels [1, 3, n, H, W]
fp32, tail [3, 5, H, W] to fade into the next clip, and [1]: whether a value was NaN or infinity, which nobody waits for
before the last clip."""


def decode_clips(
    raw_THWC: torch.Tensor, plan: chunks.DecodePlan, make: MakeClip, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Yield the pixels of every clip, then what is left of the last one's tail. Raises FastH3Error after that if a clip
    was not finite."""
    raw_THWC = torch.cat([raw_THWC, raw_THWC[-1:].expand(plan.pad, -1, -1, -1)])
    tail, remaining, broken = None, plan.frames, []
    for clip in range(plan.clips):
        first, count = clip * chunks.CLIP_LATENTS, min(chunks.CLIP_FRAMES, remaining)
        pixels, tail, wrong = make(raw_THWC[first : first + chunks.DECODED_LATENTS], first, count, tail)
        broken.append(wrong)
        remaining -= count
        yield pixels
        del pixels  # the consumer's alone while the next clip is decoded
    if remaining:
        yield latents.to_pixels(tail[:, :remaining])
    _refuse_broken(broken, dtype)


def _refuse_broken(broken: list[torch.Tensor], dtype: torch.dtype) -> None:
    if bad := torch.cat(broken).nonzero().flatten().tolist():
        raise FastH3Error(
            f"clips {bad} of {len(broken)} were decoded to NaN or infinity in {dtype}. Load the VAE with "
            "dtype bf16 or fp32; if it is, the file or the latent is damaged."
        )


class TileClips:
    """MakeClip of the released plan: tiles in batches, then put together by one kernel."""

    def __init__(self, decoder: ViTDecoder, rows: Axis, columns: Axis, device: torch.device, run: Run):
        self.decoder, self.run = decoder, run
        self.rows, self.columns = rows.in_latents(), columns.in_latents()
        self.size = rows.length, columns.length
        self.lines = [Lines.of(axis.starts, axis.size, device) for axis in (rows, columns)]
        grid = (chunks.DECODED_LATENTS, self.rows.size, self.columns.size)
        self.rotations = decoder.rotations(grid, device)
        self.statistics = latents.pixel_statistics(device)
        self.stitch = registry.resolve("stitch_tiles", "auto", Case(device=device, dtype=decoder.dtype))
        tiles = len(rows.starts) * len(columns.starts)
        self.patches = torch.empty(tiles, math.prod(grid), math.prod(PATCH), dtype=decoder.dtype, device=device)

    def __call__(
        self, raw_THWC: torch.Tensor, first: int, count: int, previous: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._decode(raw_THWC)
        pixels = self.patches.new_empty(PATCH[0], count, *self.size, dtype=torch.float32)
        tail = self.patches.new_empty(PATCH[0], chunks.OVERLAP_FRAMES, *self.size)
        broken = self.patches.new_zeros(1, dtype=torch.int32)
        mean, std = self.statistics
        self.stitch(self.patches, *self.lines, chunks.BODY.start, pixels, broken, std, mean, previous)
        self.stitch(self.patches, *self.lines, chunks.TAIL.start, tail, broken)
        return pixels[None], tail, broken

    def _decode(self, raw_THWC: torch.Tensor) -> None:
        """Fill `patches`, as many tiles a call as memory allows."""
        places = [(r, c) for r in range(len(self.rows.starts)) for c in range(len(self.columns.starts))]
        done, run = 0, self.run
        while left := len(places) - done:
            run.check_interrupt()
            # calls of one size: the last one of a clip is not left with a tile or two
            batch = places[done : done + math.ceil(left / math.ceil(left / run.tiles))]
            views = [raw_THWC[:, self.rows.tile(r), self.columns.tile(c)] for r, c in batch]
            try:
                with exact_fp32(raw_THWC.device):
                    self.patches[done : done + len(batch)] = self.decoder(torch.stack(views), self.rotations)
                failed = False
            except torch.OutOfMemoryError:
                if not run.may_shrink:
                    raise
                failed = True
            if failed:  # outside the handler, whose traceback keeps the failed call's tensors alive
                run.shrink()
                continue
            done += len(batch)
            run.advance(len(batch))


class WholeFrames:
    """Decodes spans of latents by windows."""

    def __init__(self, decoder: ViTDecoder, options: WindowOptions, run: Run):
        self.decoder, self.options, self.run = decoder, options, run

    def frames(self, raw_THWC: torch.Tensor, span: Span) -> torch.Tensor:
        """[3, 4t, H, W] of a span's latents."""
        self.run.check_interrupt()
        with exact_fp32(raw_THWC.device):
            frames = self.decoder.whole_frames(raw_THWC, *self.options.coordinates(span), self.options)
        self.run.advance(1)
        return frames

    def clip(
        self, raw_THWC: torch.Tensor, first: int, count: int, previous: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """MakeClip of the released clips."""
        frames = self.frames(raw_THWC, Span(first, first + chunks.DECODED_LATENTS))
        body = frames[:, chunks.BODY]
        if previous is not None:
            chunks.blend_tail(body, previous)
        return latents.to_pixels(body[:, :count]), frames[:, chunks.TAIL].clone(), _broken(frames)

    def blocks(self, raw_THWC: torch.Tensor, spans: list[Span]) -> Iterator[torch.Tensor]:
        """Yield the pixels of spans that are decoded by themselves."""
        broken = []
        for span in spans:
            part = raw_THWC[span.first : span.stop]
            frames = self.frames(torch.cat([part, part[-1:].expand(span.repeated, -1, -1, -1)]), span)
            broken.append(_broken(frames))
            yield latents.to_pixels(frames[:, span.kept_frames()])
        _refuse_broken(broken, self.decoder.dtype)


def _broken(frames: torch.Tensor) -> torch.Tensor:
    """[1]: a sum keeps NaN and infinity."""
    return ~frames.sum(dtype=torch.float32).isfinite().view(1)
