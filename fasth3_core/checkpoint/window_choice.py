"""What probe-decoder found out about a 24-block decoder, in a small file beside it."""

import json
from dataclasses import asdict
from pathlib import Path

from ..atomic import replacing
from ..errors import CheckpointError, ConfigError
from ..vae.windows import WindowOptions

SUFFIX = ".windows.json"
FORMAT = "fasth3-decoder-windows-1"


def choice_file(decoder: Path) -> Path:
    return decoder.with_name(decoder.name + SUFFIX)


def remember(decoder: Path, options: WindowOptions, psnr_db: float, teacher: Path) -> Path:
    """Write the choice beside the decoder; returns where. The size of the file tells another one of the same name."""
    found = {
        "format": FORMAT, "options": asdict(options), "psnr_db": round(psnr_db, 2), "compared_with": teacher.name,
        "bytes": decoder.stat().st_size,
    }
    with replacing(choice_file(decoder)) as partial:
        partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return choice_file(decoder)


def recall(decoder: Path) -> WindowOptions | None:
    """The choice for this file, or None if there is none for a file of this size.

    Raises CheckpointError for a choice that cannot be read.
    """
    path = choice_file(decoder)
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}, expected {FORMAT!r}")
        options = WindowOptions(**found["options"])
        size = found["bytes"]
    except (ValueError, KeyError, TypeError, ConfigError, OSError) as error:
        mend = "delete it and run probe-decoder again"
        raise CheckpointError(f"{path.name} cannot be read ({error}): {mend}.") from error
    return options if size == decoder.stat().st_size else None
