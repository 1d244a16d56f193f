"""SHA-256 of the files of a component, to compare with what a release publishes."""

import hashlib
from pathlib import Path

from .component import Component

_PIECE = 16 << 20


def checksums(component: Component) -> dict[str, str]:
    """File name -> its SHA-256 in hexadecimal, of the whole file."""
    return {file.path.name: _sha256(file.path) for file in component.files}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
