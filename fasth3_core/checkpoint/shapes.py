"""Which tensors a component must have, and of which shape, found out from the file's own majority.

A template maps a tensor name to its sizes: a number, the name of a dimension ("hidden"), or a multiple ("3*inner").
Each dimension takes the value that most tensors agree on, so the tensor that is named as wrong is the odd one out.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

Size = int | str
Template = Mapping[str, tuple[Size, ...]]
Shapes = Mapping[str, tuple[int, ...]]


def dimensions(template: Template, shapes: Shapes) -> dict[str, int]:
    """The value of every dimension that at least one tensor shows."""
    votes: dict[str, Counter[int]] = defaultdict(Counter)
    for name, sizes in template.items():
        shape = shapes.get(name, ())
        if len(shape) != len(sizes):
            continue
        for size, n in zip(sizes, shape, strict=True):
            if isinstance(size, str):
                factor, dim = _parse(size)
                if n and n % factor == 0:
                    votes[dim][n // factor] += 1
    return {dim: counter.most_common(1)[0][0] for dim, counter in votes.items()}


def expected(template: Template, dims: Mapping[str, int]) -> dict[str, tuple[int, ...] | None]:
    """Shape of every tensor of the template; None where a dimension is unknown."""
    return {name: _shape(sizes, dims) for name, sizes in template.items()}


def count(names: Iterable[str], prefix: str) -> int:
    """One more than the highest N of names `prefix` N `.` ...: how many blocks the file numbers.

    A number of more than three digits is no block: the name is reported as unknown, and no list is made of its size.
    """
    heads = {name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)}
    return max((int(head) for head in heads if re.fullmatch("[0-9]{1,3}", head)), default=-1) + 1


def _parse(size: str) -> tuple[int, str]:
    factor, _, dim = size.rpartition("*")
    return int(factor or 1), dim


def _shape(sizes: tuple[Size, ...], dims: Mapping[str, int]) -> tuple[int, ...] | None:
    shape = []
    for size in sizes:
        if isinstance(size, str):
            factor, dim = _parse(size)
            if dim not in dims:
                return None
            size = factor * dims[dim]
        shape.append(size)
    return tuple(shape)
