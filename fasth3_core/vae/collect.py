"""Writing decoded chunks into one buffer; from CUDA to the host while the GPU goes on decoding."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..errors import GeometryError
from .chunks import decode_plan
from .run import Progress, nothing
from .tiling import STEP

log = logging.getLogger("fasth3.vae")

STAGE = 4 << 20
"""Elements of one page-locked buffer, 16 MiB of fp32: 0.3 ms of transfer, so that starting one costs nothing."""


class Decodes:
    """Frames as one tensor, for what has a `device` and yields them clip by clip."""

    device: torch.device

    def decode(
        self,
        latent: torch.Tensor,
        *,
        tile_batch: int = 0,
        out_device: torch.device | str = "cpu",
        on_chunk: Progress | None = None,
        check_interrupt: Callable[[], None] = nothing,
    ) -> torch.Tensor:
        """All frames as one tensor [1, 3, F, H, W] fp32 on `out_device`. Arguments as of decode_chunks()."""
        parts = self.decode_chunks(latent, tile_batch=tile_batch, on_chunk=on_chunk, check_interrupt=check_interrupt)
        _, _, T, h, w = latent.shape
        out = torch.empty(1, 3, decode_plan(T).frames, h * STEP, w * STEP, dtype=torch.float32, device=out_device)
        return collect(parts, out, self.device)


def collect(chunks: Iterable[torch.Tensor], out: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Write chunks [1, C, n, H, W], made on `device`, one after the other into out [1, C, F, H, W]; return it.

    Raises GeometryError if there are not F frames of them.
    """
    if device.type == "cuda" and out.device.type == "cpu":
        done = _from_cuda(chunks, out, device)
    else:
        done = 0
        for chunk in chunks:
            out[:, :, done : done + chunk.shape[2]].copy_(chunk)
            done += chunk.shape[2]
    if done != out.shape[2]:
        raise GeometryError(f"{done} frames were decoded, expected {out.shape[2]}")
    return out


def _from_cuda(chunks: Iterable[torch.Tensor], out: torch.Tensor, device: torch.device) -> int:
    """A thread and a stream of its own keep the copies off the launches of the next clip. A driver's copy to ordinary
    memory holds up launches too, so they go through small page-locked buffers, and the thread writes `out`, whose
    pages it touches while the first clip is decoded: fresh ones come at 1 to 2 GB/s."""
    side = torch.cuda.Stream(device)
    locked = out.is_pinned()
    stages = () if locked else page_locked(out.dtype)

    def enqueue(target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        target.copy_(source, non_blocking=True)
        return side.record_event()

    def copy(chunk: torch.Tensor, ready: torch.cuda.Event, start: int) -> None:
        with torch.cuda.stream(side), torch.inference_mode(out.is_inference()):
            side.wait_event(ready)
            if locked:
                for source, target in planes(chunk, out, start):
                    enqueue(target, source)
                side.synchronize()
            else:
                through(stages, planes(chunk, out, start), enqueue)

    def touch() -> None:
        with torch.inference_mode(out.is_inference()):
            out.zero_()

    def mark() -> torch.cuda.Event:
        return torch.cuda.current_stream(device).record_event()

    return write_behind(chunks, mark, copy, nothing if locked else touch)


def page_locked(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Two buffers of STAGE elements, page-locked unless the system gives none: copies then wait for each other."""
    try:
        return tuple(torch.empty(STAGE, dtype=dtype, device="cpu", pin_memory=True) for _ in range(2))
    except RuntimeError as error:
        log.warning("no page-locked memory, frames are copied more slowly: %s", str(error).splitlines()[0])
        return tuple(torch.empty(STAGE, dtype=dtype, device="cpu") for _ in range(2))


def planes(chunk: torch.Tensor, out: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(source, target) of every colour of a chunk that goes to frame `start`, each contiguous, as one dimension."""
    for channel, plane in enumerate(chunk[0]):
        yield plane.reshape(-1), out[0, channel, start : start + plane.shape[0]].view(-1)


def through(
    stages: tuple[torch.Tensor, ...],
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    enqueue: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    """Copy every (source, target) by way of the stages in turn; a stage is emptied while the next one fills.

    enqueue(stage, source) starts a copy and returns what to `synchronize()` for its end.
    """
    size, turn, filling = len(stages[0]), 0, deque()

    def empty_oldest() -> None:
        filled, stage, target = filling.popleft()
        filled.synchronize()
        target.copy_(stage)

    for source, target in pairs:
        for part, into in zip(source.split(size), target.split(size), strict=True):
            if len(filling) == len(stages):
                empty_oldest()
            stage = stages[turn % len(stages)][: len(part)]
            filling.append((enqueue(stage, part), stage, into))
            turn += 1
    while filling:
        empty_oldest()


def write_behind(
    chunks: Iterable[torch.Tensor],
    mark: Callable[[], Any],
    copy: Callable[[torch.Tensor, Any, int], None],
    first: Callable[[], None] = nothing,
) -> int:
    """Run copy(chunk, mark(), first frame) of every chunk in a second thread, one chunk behind. Frames written.

    first() runs in that thread before any copy, mark() here, right after its chunk came. What a copy raises is raised
    here; all copies are over on return.
    """
    done = 0
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="fasth3-copy") as thread:
        pending = thread.submit(first)
        for chunk in chunks:
            ready = mark()
            pending.result()
            pending = thread.submit(copy, chunk, ready, done)
            done += chunk.shape[2]
        pending.result()
    return done
