"""Contexts in which fp32 means fp32. The settings belong to the process and are the caller's again afterwards.

Never hold one across a `yield` of your own generator: the consumer would run inside it.

torch 2.9 and newer have two families of flags and refuse to read the old one once the new one was written. Staying in
the family in use keeps both readable, and a flag that already says fp32 is not written at all.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

_FULL = ("ieee", "none")
"""Values of a newer flag that mean fp32; "none" is what nobody set, on the flag or on those it inherits from."""


class _Shared:
    """Settings of the process that several threads may need at once: the first one in changes them, the last one out
    puts them back."""

    def __init__(self, change: Callable[[ExitStack], None]) -> None:
        self._change, self._lock, self._users, self._undo = change, threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                with ExitStack() as undo:
                    self._change(undo)
                    self._undo = undo.pop_all()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo.close()


def _no_tf32_in_convolutions(undo: ExitStack) -> None:
    cudnn, operations = torch.backends.cudnn, _operations("cudnn.conv", "mkldnn.conv")
    _note(operations, undo)
    with suppress(RuntimeError):  # the newer family is in use
        if cudnn.allow_tf32:
            undo.callback(setattr, cudnn, "allow_tf32", True)
            cudnn.allow_tf32 = False
    _ieee(operations)


def _no_tf32_in_matmuls(undo: ExitStack) -> None:
    operations = _operations("cuda.matmul", "mkldnn.matmul")
    _note(operations, undo)
    with suppress(RuntimeError):
        level = torch.get_float32_matmul_precision()
        if level != "highest":
            undo.callback(torch.set_float32_matmul_precision, level)
            torch.set_float32_matmul_precision("highest")
    _ieee(operations)


def _operations(*names: str) -> list[Any]:
    """The holders of the newer flags; none before torch 2.9."""
    found = []
    for backend, operation in (name.split(".") for name in names):
        holder = getattr(getattr(torch.backends, backend), operation, None)
        found += [holder] if hasattr(holder, "fp32_precision") else []
    return found


def _note(operations: list[Any], undo: ExitStack) -> None:
    """Put the newer flags back last of all: restoring an old flag writes several of them."""

    def put_back(operation: Any, before: str) -> None:
        if operation.fp32_precision != before:
            operation.fp32_precision = before

    for operation in operations:
        undo.callback(put_back, operation, operation.fp32_precision)


def _ieee(operations: list[Any]) -> None:
    """What the old flags left lowered: set by the newer ones, or inherited from a backend or from all of them."""
    for operation in operations:
        if operation.fp32_precision not in _FULL:
            operation.fp32_precision = "ieee"


_convolutions, _matmuls = _Shared(_no_tf32_in_convolutions), _Shared(_no_tf32_in_matmuls)


def full_precision_matmul():
    """Context: no TF32 and no bf16 in fp32 matrix products."""
    return _matmuls()


@contextmanager
def exact_fp32(device: torch.device) -> Iterator[None]:
    """Autocast off, and no TF32 in convolutions either: cuDNN allows it by default, enough to change an fp32 encode."""
    with torch.autocast(device.type, enabled=False), _convolutions(), _matmuls():
        yield
