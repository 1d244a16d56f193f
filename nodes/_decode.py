"""Decoding wherever there is memory for it: the host's device, tile by tile, the next device, the CPU."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ..fasth3_core.errors import ConfigError, FastH3Error
from ..fasth3_core.packing.geometry import LATENT_PIXELS, frames_of_latents
from ..fasth3_core.vae.resume import is_out_of_memory
from . import _host
from ._vae_pair import VaePair

log = logging.getLogger("fasth3")

_GIB = 1 << 30


@dataclass
class Decoder:
    """One latent and where it is decoded. `notes` has a line for every place that had too little memory."""

    host: _host.Host
    vae: VaePair
    video: torch.Tensor
    audio: torch.Tensor
    tile_batch: int
    notes: list[str] = field(default_factory=list)

    @property
    def frames(self) -> int:
        return frames_of_latents(self.video.shape[2])

    @property
    def warnings(self) -> list[str]:
        """What the reader of the result has to know: that it is a draft, and where memory ran out."""
        return [*filter(None, [self.vae.note]), *self.notes]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.video.shape[3] * LATENT_PIXELS, self.video.shape[4] * LATENT_PIXELS

    def waveform(self) -> torch.Tensor:
        """[1, 2, L] on the CPU, exactly as long as the frames."""
        found = []
        self.somewhere(lambda tiles: found.append(self.vae.audio.to_waveform(self.audio, self.frames).float().cpu()))
        return found[0]

    def somewhere(self, attempt: Callable[[int], None]) -> None:
        """Run attempt(tiles a call) with the VAE on one device after the other until one has the memory for it.

        Raises FastH3Error if none has. All else that an attempt raises passes through.
        """
        problems = []
        for device, tiles in self._places():
            if problems:
                where = "tile by tile" if tiles == 1 else "there"
                self._note(f"{problems[-1]}; all models were sent away, and decoding went on on {device}, {where}")
                self.host.release_all()
                self.vae = self.vae.runnable_on(device)
            problem = self._try(device, tiles, attempt)
            if problem is None:
                return
            problems.append(problem)
        self.host.release_all()
        raise FastH3Error("there is not enough memory to decode: " + "; ".join(problems) + ".")

    def _places(self) -> Iterator[tuple[torch.device, int]]:
        device = self.host.device()
        yield device, self.tile_batch
        yield device, 1
        if device.type == "cpu":
            return
        for index in range(torch.get_device_module(device).device_count()):
            other = torch.device(device.type, index)
            if other != device and device.index is not None:
                yield other, 1
        yield torch.device("cpu"), 1

    def _try(self, device: torch.device, tiles: int, attempt: Callable[[int], None]) -> str | None:
        """None, or why there was too little memory: text, as an exception would keep the attempt's tensors alive."""
        try:
            self._make_room(device, tiles)
            with torch.inference_mode():
                attempt(tiles)
            return None
        except ConfigError as error:
            if error.field != "weights":  # the host's refusal of weights that do not fit
                raise
            return f"{device}: {error}"
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("FastH3: decoding ran out of memory on %s", device, exc_info=True)
            return f"out of memory on {device} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"

    def _make_room(self, device: torch.device, tiles: int) -> None:
        """Ask for room, look whether it is there, and if not, send all others away."""
        height, width = self.size
        working = self.vae.working_bytes(tiles, height, width)
        self.host.acquire(self.vae, device, working)
        free = _usable(device)
        if free is None or free >= working:
            return
        log.info("FastH3: %.1f GiB free on %s, decoding takes %.1f: all models go", free / _GIB, device, working / _GIB)
        self.host.release_all()
        self.host.acquire(self.vae, device, working)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        log.warning("FastH3: %s", text)


def _usable(device: torch.device) -> int | None:
    """Bytes that torch can hand out: free on the device, and kept from freed tensors. None where nobody tells: the CPU,
    MPS."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    return module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)
