"""A numbered name in the output folder, kept from other processes while the file is made."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from . import _host


@contextmanager
def output_file(prefix: str, suffix: str, width: int = 0, height: int = 0) -> Iterator[_host.OutputFile]:
    """The host's next free numbered file of a prefix, and of no other process until the block ends: the same number
    looks free to all that write into one folder, and the last one would replace the videos of the others.

    A hidden file stands for the number; one that a killed process left behind goes with its temporary files.
    """
    file = _host.get().output_file(prefix, suffix, width, height)
    folder, (name, number) = file.path.parent, file.filename.removesuffix(suffix).removesuffix("_").rsplit("_", 1)
    for n in itertools.count(int(number)):
        stem = f"{name}_{n:05}_"
        held = folder / f".{stem}.0.part"
        try:
            os.close(os.open(held, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        try:
            if any(entry.name.startswith(stem) for entry in folder.iterdir()):
                continue  # finished since the host looked
            yield replace(file, path=folder / f"{stem}{suffix}", filename=f"{stem}{suffix}")
            return
        finally:
            held.unlink(missing_ok=True)
