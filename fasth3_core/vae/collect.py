"""Writing decoded chunks into one buffer; from CUDA to the host while the GPU goes on decoding."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..errors import GeometryError


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
    """A copy to ordinary host memory blocks its thread, and touches fresh pages at 1 to 2 GB/s: a thread and a stream
    of its own keep it off the launches of the next clip."""
    side = torch.cuda.Stream(device)

    def copy(chunk: torch.Tensor, ready: torch.cuda.Event, start: int) -> None:
        with torch.cuda.stream(side):
            side.wait_event(ready)
            copy_planes(chunk, out, start)

    return write_behind(chunks, lambda: torch.cuda.current_stream(device).record_event(), copy)


def copy_planes(chunk: torch.Tensor, out: torch.Tensor, start: int) -> None:
    """chunk into out at frame `start`. One colour at a time: contiguous on both sides, so no staging copy is made."""
    with torch.inference_mode(out.is_inference()):  # the mode is per thread, and such a buffer is written in it alone
        for channel, plane in enumerate(chunk[0]):
            out[0, channel, start : start + plane.shape[0]].copy_(plane)


def write_behind(
    chunks: Iterable[torch.Tensor], mark: Callable[[], Any], copy: Callable[[torch.Tensor, Any, int], None]
) -> int:
    """Run copy(chunk, mark(), first frame) of every chunk in a second thread, one chunk behind. Frames written.

    mark() runs here, right after its chunk came. What a copy raises is raised here; all copies are over on return.
    """
    done, pending = 0, Future()
    pending.set_result(None)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="fasth3-copy") as thread:
        for chunk in chunks:
            ready = mark()
            pending.result()
            pending = thread.submit(copy, chunk, ready, done)
            done += chunk.shape[2]
        pending.result()
    return done
