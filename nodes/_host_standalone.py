"""The nodes' surroundings without ComfyUI: plain folders, progress lines, and a list of loaded weights."""

import logging
import re
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image

from ..fasth3_core.errors import ConfigError
from ..fasth3_core.weights.host_memory import available_bytes
from ..fasth3_core.weights.placement import Room
from ..fasth3_core.weights.places import indexed
from ._host import COMFYUI, OutputFile, Resident, does_not_fit
from ._paths import is_within

log = logging.getLogger("fasth3")

_SECONDS_BETWEEN_LINES = 2.0


class StreamPair:
    """Video and audio in one value, in the form of ComfyUI's NestedTensor."""

    is_nested = True

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.tensors = list(tensors)

    def unbind(self) -> list[torch.Tensor]:
        return self.tensors

    def __repr__(self) -> str:
        return f"StreamPair({[list(t.shape) for t in self.tensors]})"


def _default_device() -> torch.device:
    # a GPU build of torch names its accelerator even where there is none
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def _free_bytes(device: torch.device) -> int:
    module = torch.get_device_module(device)
    module.empty_cache()  # what torch keeps of freed tensors counts as free too
    return module.mem_get_info(device)[0]


class StandaloneHost:
    """Implements `_host.Host` over three folders.

    Args:
        models: holds one folder per kind of model, as ComfyUI's `models` does.
        device: where models run; None picks the accelerator that torch finds, else the CPU.
    """

    def __init__(
        self,
        models: Path = Path("models"),
        inputs: Path = Path("input"),
        outputs: Path = Path("output"),
        device: torch.device | None = None,
    ):
        self._models, self._inputs, self._outputs = Path(models), Path(inputs), Path(outputs)
        self._device = indexed(device or _default_device())
        self._residents: list[weakref.ref[Resident]] = []

    def model_roots(self, folder: str) -> list[Path]:
        return [self._models / folder]

    def input_dir(self) -> Path:
        return self._inputs

    def output_dir(self) -> Path:
        return self._outputs

    def output_file(self, prefix: str, suffix: str, width: int = 0, height: int = 0) -> OutputFile:
        for name, value in {"width": width, "height": height}.items():
            prefix = prefix.replace(f"%{name}%", str(value))
        for name, code in (("year", "%Y"), ("month", "%m"), ("day", "%d"),
                           ("hour", "%H"), ("minute", "%M"), ("second", "%S")):
            prefix = prefix.replace(f"%{name}%", time.strftime(code))
        wanted = self._outputs / prefix
        if not is_within(self._outputs, wanted.parent):
            raise ConfigError("filename_prefix", prefix, "a name inside the output folder", "Remove '..' and '/'.")
        wanted.parent.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(re.escape(wanted.name) + r"_(\d+)_(?:\..*)?")
        taken = [int(m.group(1)) for entry in wanted.parent.iterdir() if (m := pattern.fullmatch(entry.name))]
        filename = f"{wanted.name}_{max(taken, default=0) + 1:05}_{suffix}"
        subfolder = wanted.parent.relative_to(self._outputs).as_posix()
        return OutputFile(wanted.parent / filename, filename, "" if subfolder == "." else subfolder)

    def device(self) -> torch.device:
        return self._device

    def progress(self, total: int) -> Callable[[int, Image.Image | None], None]:
        last = time.monotonic()

        def update(done: int, preview: Image.Image | None = None) -> None:
            nonlocal last
            if done == total or time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                log.info("  %d of %d", done, total)

        return update

    def wants_preview(self) -> bool:
        return False

    def wants_metadata(self) -> bool:
        return True

    def check_interrupt(self) -> None:
        """Ctrl-C raises by itself."""

    def show_text(self, node_id: str | None, text: str) -> None:
        """The log has it."""

    def acquire(self, resident: Resident, device: torch.device, working_bytes: int) -> None:
        missing = 0 if resident.location == device else resident.nbytes(device)
        others = [ref for ref in self._residents if ref() is not None and ref() is not resident]
        if device.type != "cpu":
            while (free := _free_bytes(device)) < missing + working_bytes and others:
                others.pop(0)().release()  # the longest unused first
            if free < missing:
                raise does_not_fit(missing, free, device)
        self._residents = [*others, weakref.ref(resident)]
        resident.materialise(device)

    def room(self, device: torch.device) -> Room:
        on_device = None
        if device.type != "cpu":
            held = (ref() for ref in self._residents)
            loaded = sum(r.nbytes(device) for r in held if r is not None and r.location == device)
            on_device = _free_bytes(device) + loaded
        host = available_bytes()
        return Room(device=on_device, host=host, pinnable=host * 3 // 4)

    def give_back(self, resident: Resident) -> None:
        resident.release()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()

    def release_all(self) -> None:
        for ref in self._residents:
            if (resident := ref()) is not None:
                resident.release()
        self._residents.clear()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()

    def nested(self, tensors: Sequence[torch.Tensor]):
        if COMFYUI:
            from comfy.nested_tensor import NestedTensor

            return NestedTensor(tensors)
        return StreamPair(tensors)
