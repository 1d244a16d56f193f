"""Values from files into tensors, in pieces of bounded size, wherever the tensor lives.

Reads go through `readinto` rather than a memory map: straight into a CPU tensor of the same dtype, else through a
staging buffer. A private map of a whole checkpoint counts against the memory limit of the machine, and a file that
shrinks under a map kills the process instead of raising.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Protocol

import torch

from ..errors import CheckpointError
from .dtypes import NAMES, TORCH
from .files import Stored, WeightFile

PIECE = 32 << 20
"""Bytes read at a time; an interrupt is noticed after each. Two staging buffers of this size feed a CUDA device."""


class Reader(Protocol):
    """Where assembled tensors take their rows from."""

    device: torch.device

    def rows(self, name: str, start: int, dest: torch.Tensor) -> None:
        """Fill `dest` [rows, ...], contiguous, with the rows of a stored tensor from `start`, in dest's dtype."""

    def as_one(self, nbytes: int) -> AbstractContextManager[None]:
        """A context that counts what is read inside as `nbytes` once, at its end: for a tensor made from several."""


@contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read any more ({error.strerror}). Put the file back, or load the model from elsewhere."
        ) from error


class FileReader:
    """Fills tensors on one device from the files of a component. Use it as a context: it keeps one file open."""

    def __init__(
        self,
        files: Mapping[Path, WeightFile],
        tensors: Mapping[str, Stored],
        device: torch.device,
        on_piece: Callable[[int], None],
    ) -> None:
        self.device = device
        self._files = files
        self._tensors = tensors
        self._on_piece = on_piece
        self._open: tuple[Path, BinaryIO] | None = None
        self._staging: list[_Staging] = []

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(self, *_) -> None:
        self._close()
        for staging in self._staging:
            staging.wait()
        self._staging = []

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One stored tensor, whole."""
        stored = self._tensors[name]
        out = torch.empty(stored.shape, dtype=dtype or TORCH[stored.dtype], device=self.device)
        self.rows(name, 0, out.view(1) if out.ndim == 0 else out)
        return out

    def rows(self, name: str, start: int, dest: torch.Tensor) -> None:
        stored = self._tensors[name]
        dtype = TORCH[stored.dtype]
        row_bytes = math.prod(stored.shape[1:]) * dtype.itemsize
        file = self._file(stored.path)
        file.seek(stored.offset + start * row_bytes)
        flat = dest.view(-1)
        direct = dest.dtype == dtype and dest.device.type == "cpu"
        step = PIECE // dtype.itemsize
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            if direct:
                self._fill(file, part.view(torch.uint8), stored.path)
            else:
                staging = self._next_staging()
                raw = staging.buffer[: part.numel() * dtype.itemsize]
                self._fill(file, raw, stored.path)
                # from pinned memory the copy is asynchronous and a change of dtype happens on the device
                part.copy_(raw.view(dtype), non_blocking=staging.event is not None)
                staging.record()
            self._on_piece(part.numel() * dest.dtype.itemsize)

    @contextmanager
    def as_one(self, nbytes: int) -> Iterator[None]:
        report, self._on_piece = self._on_piece, lambda count: report(0)  # an interrupt is noticed as often as before
        try:
            yield
        finally:
            self._on_piece = report
        report(nbytes)

    def _fill(self, file: BinaryIO, raw: torch.Tensor, path: Path) -> None:
        view = memoryview(raw.numpy())
        while view.nbytes:
            with _said(path):
                count = file.readinto(view)
            if not count:
                raise CheckpointError(f"{path} ended while its values were read: it changed since it was opened.")
            view = view[count:]

    def _file(self, path: Path) -> BinaryIO:
        if self._open is None or self._open[0] != path:
            self._close()
            with _said(path):
                file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by __exit__ or by the next file
            self._open = (path, file)
            known, now = self._files[path], os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (known.size, known.mtime_ns):
                raise CheckpointError(f"{path} changed on disk since the model was loaded. Load the model again.")
        return self._open[1]

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _next_staging(self) -> "_Staging":
        if not self._staging:
            self._staging = [_Staging(self.device) for _ in range(2 if self.device.type == "cuda" else 1)]
        self._staging.append(self._staging.pop(0))
        self._staging[-1].wait()
        return self._staging[-1]


class _Staging:
    """A host buffer that may be written again once the copy out of it is done."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.buffer = torch.empty(PIECE, dtype=torch.uint8, device="cpu", pin_memory=cuda)
        self.event = torch.cuda.Event() if cuda else None
        self._device = device

    def record(self) -> None:
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class MemoryReader:
    """The same for tensors that are already in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.device = device
        self._tensors = tensors

    def __enter__(self) -> "MemoryReader":
        return self

    def __exit__(self, *_) -> None:
        pass

    def rows(self, name: str, start: int, dest: torch.Tensor) -> None:
        source = self._tensors[name]
        source = source.reshape(1) if source.ndim == 0 else source
        dest.copy_(source[start : start + dest.shape[0]].reshape(dest.shape))

    def as_one(self, nbytes: int) -> AbstractContextManager[None]:
        return nullcontext()


class MemorySource:
    """Tensors in memory under their file names, as a component would give them."""

    label = "the dict of tensors"
    config = None

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        self.tensors = {name: Stored(NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        self.metadata = metadata or {}
        self._values = tensors

    def open(self, device: torch.device | str = "cpu") -> MemoryReader:
        return MemoryReader(self._values, torch.device(device))
