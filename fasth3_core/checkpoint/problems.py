"""One message for everything that is wrong with a file, grouped so that 600 tensors take a few lines."""

import re
from collections.abc import Iterable, Sequence

from ..errors import CheckpointError

_LINES = 12
"""Groups listed for each kind of problem."""


_NUMBERED = re.compile(r"((?:blocks?|layers|resnets|down|ups|convs[12]|activations)\.)\d+(?=\.)")


def starred(name: str) -> str:
    """The name with the numbers of blocks replaced by *."""
    return _NUMBERED.sub(r"\1*", name)


def grouped(names: Iterable[str], what: str) -> list[str]:
    """Lines such as `blocks.*.attn.qkv_proj.weight: 50 missing (blocks.0.attn.qkv_proj.weight, ...)`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(starred(name), []).append(name)
    lines = []
    for pattern, members in groups.items():
        example = "" if members == [pattern] else f" ({members[0]}{', ...' if len(members) > 1 else ''})"
        lines.append(f"{pattern}: {len(members)} {what}{example}")
    if len(lines) > _LINES:
        rest = sum(len(members) for members in list(groups.values())[_LINES:])
        lines[_LINES:] = [f"and {rest} more {what}"]
    return lines


def report(label: str, title: str, lines: Sequence[str], mend: str) -> CheckpointError:
    """The error to raise for a non-empty list of lines."""
    return CheckpointError(f"{label} is not a complete {title}:\n  " + "\n  ".join(lines) + f"\n{mend}")
