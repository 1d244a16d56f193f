"""Contexts in which fp32 means fp32. The settings belong to the process and are the caller's again afterwards.

Never hold one across a `yield` of your own generator: the consumer would run inside it.

torch 2.9 and newer have two families of flags and refuse to read the old one once the new one was written. Staying in
the family in use keeps both readable, and a flag that already says fp32 is not written at all.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def full_precision_matmul() -> Iterator[None]:
    """No TF32 and no bf16 in fp32 matrix products."""
    with ExitStack() as undo:
        _matmuls(undo)
        yield


@contextmanager
def exact_fp32(device: torch.device) -> Iterator[None]:
    """Autocast off, and no TF32 in convolutions either: cuDNN allows it by default, enough to change an fp32 encode."""
    with ExitStack() as undo, torch.autocast(device.type, enabled=False):
        _convolutions(undo)
        _matmuls(undo)
        yield


def _convolutions(undo: ExitStack) -> None:
    cudnn = torch.backends.cudnn
    try:
        if cudnn.allow_tf32:
            undo.callback(setattr, cudnn, "allow_tf32", True)
            cudnn.allow_tf32 = False
    except RuntimeError:
        _ieee(cudnn.conv, undo)


def _matmuls(undo: ExitStack) -> None:
    try:
        level = torch.get_float32_matmul_precision()
        if level != "highest":
            undo.callback(torch.set_float32_matmul_precision, level)
            torch.set_float32_matmul_precision("highest")
    except RuntimeError:
        _ieee(torch.backends.cuda.matmul, undo)
        _ieee(torch.backends.mkldnn.matmul, undo)


def _ieee(operation, undo: ExitStack) -> None:
    undo.callback(setattr, operation, "fp32_precision", operation.fp32_precision)
    operation.fp32_precision = "ieee"
