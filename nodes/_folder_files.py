"""Files of the input and output folders in a widget: what there is to choose, and the file behind a choice."""

from pathlib import Path

from ..fasth3_core.errors import CheckpointError
from . import _host
from ._paths import is_within

OUTPUT_MARK = " [output]"
"""How ComfyUI's widgets name a file of the output folder."""


def names(suffix: str) -> list[str]:
    """Files with this ending, those of the input folder first."""
    host = _host.get()
    return [
        path.relative_to(folder).as_posix() + mark
        for folder, mark in ((host.input_dir(), ""), (host.output_dir(), OUTPUT_MARK))
        for path in sorted(folder.rglob(f"*{suffix}"))
    ]


def resolve(name: str, hint: str) -> Path:
    """Raises CheckpointError for a name outside both folders, or of no file."""
    host = _host.get()
    folder = host.output_dir() if name.endswith(OUTPUT_MARK) else host.input_dir()
    path = folder / name.removesuffix(OUTPUT_MARK)
    if not is_within(folder, path):
        raise CheckpointError(f"{name!r} is not a name inside the input or output folder.")
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. {hint}")
    return path


def output_choice(file: _host.OutputFile) -> str:
    """How a widget names a file that a node has saved."""
    return "/".join(filter(None, (file.subfolder, file.filename))) + OUTPUT_MARK
