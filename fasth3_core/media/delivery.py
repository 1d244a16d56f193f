"""From decoded chunks to a finished file: quantised on the device, encoded in a second thread, named when complete."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ..atomic import replacing
from .behind import behind
from .formats import Output
from .mux import Movie
from .pixels import OnTheWay, quantise, send
from .sequence import PngFrames
from .sound import Sound

ABANDONED_SECONDS = 24 * 3600
"""After which a temporary file that nobody has written to is taken for what a killed process left behind."""
_TEMPORARY = re.compile(r"\..+\.\d+\.part")
"""As atomic.replacing names files."""


@contextmanager
def delivering(
    path: Path,
    output: Output,
    width: int,
    height: int,
    *,
    sound: Sound | None = None,
    metadata: Mapping[str, Any] | None = None,
    on_written: Callable[[torch.Tensor], None] = lambda frames_FHWC: None,
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Yield put(frames [n, H, W, 3] in [0, 1], any device). The file or folder `path` is there once the block has
    ended; when the block raises, or encoding does, nothing is.

    At most two chunks wait to be encoded; put() then waits.

    Args:
        on_written: called in the encoder's thread with the whole numbers [n, H, W, 3] of every chunk, before it is
            encoded.
    """
    sweep(path.parent)
    with _opened(path, output, width, height, sound, metadata) as file:

        def encode(chunk: OnTheWay) -> None:
            frames_FHWC = chunk.arrived()
            on_written(frames_FHWC)
            file.write(frames_FHWC)

        with behind(encode) as thread:
            yield lambda frames_FHWC: thread(send(quantise(frames_FHWC, output.sample_bits)))
        file.close()


@contextmanager
def _opened(path: Path, output: Output, width, height, sound, metadata) -> Iterator[Movie | PngFrames]:
    if output.form.muxer:
        with replacing(path) as partial, Movie(partial, output, width, height, sound, metadata) as movie:
            yield movie
    else:
        with _replacing_folder(path) as partial, PngFrames(partial, metadata) as frames:
            yield frames


def try_out(folder: Path, output: Output, width: int, height: int, sound: Sound | None) -> None:
    """Write one black frame of this size, and all of the sound, to a temporary file: whatever is wrong with the
    settings, the encoders or the folder is found before minutes of decoding. Raises what the real file would raise."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fasth3-", dir=folder) as temporary:
        if not output.form.muxer:
            return
        with Movie(Path(temporary) / "try", output, width, height, sound) as movie:
            dtype = torch.uint8 if output.sample_bits == 8 else torch.uint16
            movie.write(torch.zeros(1, height, width, 3, dtype=dtype, device="cpu"))
            movie.encode_all_sound()
            movie.close()


def sweep(folder: Path) -> None:
    """Remove what killed processes left in a folder a day ago or earlier, where it can be removed."""
    for left in folder.glob(".*.part"):
        if _TEMPORARY.fullmatch(left.name) is None:
            continue
        with suppress(OSError):  # another process's, finished meanwhile, or another user's
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextmanager
def _replacing_folder(path: Path) -> Iterator[Path]:
    """As atomic.replacing, for a folder that must not be there yet."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process of this number: in a container all have the same
    partial.mkdir()
    try:
        yield partial
        os.rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
