"""Frames of numbers in [0, 1] to whole numbers, on the device that they are on, and from there to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_DTYPES = {8: torch.uint8, 16: torch.uint16}


def quantise(frames_FHWC: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """[F, H, W, 3] in [0, 1] -> uint8 or uint16 on the same device, rounded to nearest; values outside are clamped, NaN
    becomes 0. Frame by frame: the temporaries of a whole clip would be four times its size."""
    out = torch.empty(frames_FHWC.shape, dtype=_DTYPES[bits], device=frames_FHWC.device)
    for frame, target in zip(frames_FHWC, out, strict=True):
        target.copy_(frame.float().nan_to_num(0.0).clamp_(0, 1).mul_(2**bits - 1).round_())
    return out


@dataclass(frozen=True)
class OnTheWay:
    """Frames whose copy to the host has been started."""

    frames_FHWC: torch.Tensor
    wait: Callable[[], None]

    def arrived(self) -> torch.Tensor:
        """The frames on the host. Waits in the calling thread; the device goes on."""
        self.wait()
        return self.frames_FHWC


def send(frames_FHWC: torch.Tensor) -> OnTheWay:
    """Start the copy to the host. From CUDA into page-locked memory: a copy to ordinary memory would hold up the
    launches of the next clip until the device has finished this one."""
    if frames_FHWC.device.type != "cuda":
        return OnTheWay(frames_FHWC.cpu(), lambda: None)
    host = torch.empty(frames_FHWC.shape, dtype=frames_FHWC.dtype, pin_memory=True, device="cpu")
    host.copy_(frames_FHWC, non_blocking=True)
    event = torch.cuda.current_stream(frames_FHWC.device).record_event()
    return OnTheWay(host, event.synchronize)
