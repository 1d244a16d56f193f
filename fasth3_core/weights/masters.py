"""Weights of one block in host memory: page-locked where the limit allows, or in a mapped file."""

import os
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch

from ..errors import ConfigError
from .parts import Weight, tensors_of, with_tensors

SMALL = 1 << 20
"""Tensors below this many bytes (norms, scales) stay on the device: 0.1 MB a block."""

ALIGN = 512
"""Bytes. As torch's own allocations on a device, so that a matrix product sees the same alignment and picks the same
kernel."""


class HostBlock:
    """The master copy of one block, and which of its tensors travel."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self.weights = MappingProxyType(dict(weights))
        self.moved = tuple(t for weight in weights.values() for t in tensors_of(weight) if t.nbytes >= SMALL)
        self.pinned_bytes = 0

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes that the travelling tensors take in a slot."""
        return sum(-(-t.nbytes // ALIGN) * ALIGN for t in self.moved)

    def small_on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Copies of the tensors that do not travel, in order."""
        parts = (t for weight in self.weights.values() for t in tensors_of(weight) if t.nbytes < SMALL)
        return tuple(t.to(device, copy=True) for t in parts)

    def over(self, moved: tuple[torch.Tensor, ...], small: tuple[torch.Tensor, ...]) -> Mapping[str, Weight]:
        """The block's weights over copies of its tensors."""
        moved_left, small_left = iter(moved), iter(small)
        return {
            name: with_tensors(weight, [next(moved_left if t.nbytes >= SMALL else small_left)
                                        for t in tensors_of(weight)])
            for name, weight in self.weights.items()
        }  # fmt: skip


class PinnedPool:
    """Page-locks host tensors where they are, up to a limit. What it has locked is unlocked when it is closed."""

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._limit = 0
        self._device = device
        self._locked: list[torch.Tensor] = []
        self._finalizer = weakref.finalize(self, _unlock, self._locked)
        self._finalizer.atexit = False  # the process takes its locks along

    def allow(self, limit: int) -> None:
        """Set the limit in bytes; what is locked already stays locked. Only CUDA devices profit."""
        self._limit = limit if self._device.type == "cuda" else 0

    def pin(self, block: HostBlock) -> None:
        """Lock the travelling tensors of a block, one by one while there is room."""
        for tensor in block.moved:
            if self.nbytes + tensor.nbytes <= self._limit and self._lock(tensor):
                block.pinned_bytes += tensor.nbytes

    def _lock(self, tensor: torch.Tensor) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1)) != 0:
            self._limit = self.nbytes  # the system gives no more; what is there stays
            _forget_error(self._device)
            return False
        self._locked.append(tensor)
        self.nbytes += tensor.nbytes
        return True

    def close(self) -> None:
        """Unlock everything. No copy out of it may be under way."""
        self._finalizer()
        self.nbytes = 0


def _unlock(locked: list[torch.Tensor]) -> None:
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop().data_ptr())


def _forget_error(device: torch.device) -> None:
    """A refused lock leaves an error behind that the next kernel launch would raise."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).item()


def mapped(block: HostBlock, folder: Path | None) -> HostBlock:
    """A copy of the block whose travelling tensors lie in a temporary file, which the system may page out.

    The space is reserved before the file is mapped: a full disk is an error here and not a crash at first use. The
    file has no name any more once it is mapped, so it is gone with the process whatever happens.

    Raises:
        ConfigError: no room on the disk.
    """
    if not block.moved:
        return block
    storage = _map(block.slot_bytes, folder)
    views = slot_views(block.moved, torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
    for view, tensor in zip(views, block.moved, strict=True):
        view.copy_(tensor)
    small = tuple(t for weight in block.weights.values() for t in tensors_of(weight) if t.nbytes < SMALL)
    return HostBlock(block.over(views, small))


def _map(nbytes: int, folder: Path | None) -> torch.UntypedStorage:
    try:
        handle, path = tempfile.mkstemp(prefix="fasth3-", suffix=".weights", dir=folder)
    except OSError as error:
        raise ConfigError(
            "policy", "mmap", "a folder for temporary files that can be written", f"{error}. Point TMPDIR to one."
        ) from error
    try:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, nbytes)
            else:
                os.truncate(handle, nbytes)  # Windows gives a file its space when it is made longer
        except OSError as error:
            raise ConfigError(
                "policy", "mmap", f"{nbytes / 2**30:.2f} GiB more on the disk of {Path(path).parent}",
                f"{error.strerror}. Free the space, point TMPDIR to another disk, or use policy 'stream'.",
            ) from error
        finally:
            os.close(handle)
        storage = torch.UntypedStorage.from_file(path, True, nbytes)
    except BaseException:
        os.unlink(path)
        raise
    try:
        os.unlink(path)
    except PermissionError:  # Windows keeps the name of a mapped file until it is unmapped
        weakref.finalize(storage, _unlink_quietly, path)
    return storage


def _unlink_quietly(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def slot_views(tensors: tuple[torch.Tensor, ...], buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of the same shapes and dtypes, one after another in a byte buffer."""
    views, at = [], 0
    for t in tensors:
        views.append(buffer[at : at + t.nbytes].view(t.dtype).view(t.shape))
        at += -(-t.nbytes // ALIGN) * ALIGN
    return tuple(views)
