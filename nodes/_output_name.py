"""Whether a filename_prefix can be saved under, found before anything runs instead of when all is done."""

import os
from pathlib import Path

from ..fasth3_core.errors import ConfigError
from . import _host
from ._paths import is_within

_LONGEST = 200
"""Bytes of one name, of 255 that file systems take: a number, a suffix and a temporary name are added."""
_LONGEST_PATH = 4000
"""Bytes of a path, of 4095 that Linux takes."""
_NOT_ON_WINDOWS = '<>:"|?*'


def check(prefix: str) -> None:
    """Raises ConfigError, with the reason. `%date:...%` and the like are left to the host."""
    output = _host.get().output_dir()
    try:
        os.fsencode(prefix)
    except UnicodeEncodeError:
        raise _wrong(prefix, "a name of whole characters", "Half of a character pair is in it: rename it.") from None
    parts = prefix.replace("\\", "/").split("/")
    refused = _NOT_ON_WINDOWS if os.name == "nt" else ""
    if any(ord(c) < 32 for c in prefix) or any(c in refused for part in parts for c in _plain(part)):
        raise _wrong(prefix, f"a name without control characters{' or ' + refused if refused else ''}", "Rename it.")
    if not parts[-1] or parts[-1] in (".", ".."):
        raise _wrong(prefix, "a name inside the output folder", "It ends in a folder; add a name, such as 'FastH3'.")
    if any(len(part.encode()) > _LONGEST for part in parts):
        raise _wrong(prefix[:40] + "...", f"names of at most {_LONGEST} bytes", "Shorten it.")
    if len(os.fsencode(output.absolute() / prefix)) > _LONGEST_PATH:
        raise _wrong(prefix[:40] + "...", f"a path of at most {_LONGEST_PATH} bytes in all", "Shorten it.")
    if not is_within(output, (output / prefix).parent):
        raise _wrong(prefix, "a name inside the output folder", "Remove '..' and '/' at the start.")
    there = _nearest_existing((output / prefix).parent)
    if not there.is_dir():
        raise _wrong(prefix, "folders on the way to the name", f"{there} is a file.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _wrong(prefix, "a folder that can be written", f"ComfyUI may not write to {there}.")


def problem(prefix: str | None) -> str | bool:
    """For validate_inputs: True, or what is wrong. None is a prefix that another node will give."""
    try:
        if prefix is not None:
            check(prefix)
    except ConfigError as error:
        return str(error)
    return True


def _plain(part: str) -> str:
    """Without %date:...%, whose colons never reach the file system."""
    return "".join(part.split("%")[::2])


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _wrong(prefix: str, expected: str, hint: str) -> ConfigError:
    return ConfigError("filename_prefix", prefix, expected, hint)
