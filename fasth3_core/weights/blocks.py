"""From a flat dict of canonical weights to those of each block."""

from collections.abc import Mapping
from typing import TypeVar

Weight = TypeVar("Weight")


def by_block(weights: Mapping[str, Weight], num_layers: int) -> tuple[dict[str, Weight], list[dict[str, Weight]]]:
    """(everything outside the main blocks, [block] -> its weights under names relative to it)."""
    top: dict[str, Weight] = {}
    blocks: list[dict[str, Weight]] = [{} for _ in range(num_layers)]
    for name, weight in weights.items():
        if name.startswith("blocks."):
            _, index, rest = name.split(".", 2)
            blocks[int(index)][rest] = weight
        else:
            top[name] = weight
    return top, blocks
