"""Reading a flat dict of tensors into weights: shapes checked, every value copied once, leftovers reported."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import CheckpointError

Weight = torch.Tensor | Any
"""A tensor [O, I], or an object that stands for one: `data` [O, I], `scale` [O, 1] and `dequantise(dtype)`."""


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b on the last dim."""

    weight: Weight
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    """Affine parameters of a group or layer norm, fp32."""

    weight: torch.Tensor
    bias: torch.Tensor


class Reader:
    """Takes named tensors out of a mapping, one at a time, so that a lazy mapping is read once and in order."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], what: str, device: torch.device):
        self.tensors, self.what, self.device = tensors, what, device
        self.taken: set[str] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name).shape)

    def take(self, name: str, shape: tuple[int | None, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor on the reader's device in `dtype`. None in `shape` matches any size."""
        return self._checked(name, self._find(name), shape, dtype)

    def _checked(
        self, name: str, value: Weight, shape: tuple[int | None, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            value = value.dequantise(dtype)
        wrong = value.ndim != len(shape) or any(
            want is not None and want != got for want, got in zip(shape, value.shape, strict=True)
        )
        if wrong:
            expected = [size if size is not None else "any" for size in shape]
            raise CheckpointError(f"{self.what}: {name} has shape {list(value.shape)}, expected {expected}")
        if not value.is_floating_point():
            raise CheckpointError(f"{self.what}: {name} is {value.dtype}; give it dequantised, as floats")
        self.taken.add(name)
        return value.detach().to(self.device, dtype).contiguous()

    def linear(
        self, prefix: str, out: int | None, inp: int | None, dtype: torch.dtype, keep_int8: bool = False
    ) -> Linear:
        """A layer; with `keep_int8` an int8 weight with a scale a row stays what it is."""
        name = f"{prefix}.weight"
        value = self._find(name)
        if keep_int8 and not isinstance(value, torch.Tensor) and value.data.dtype == torch.int8:
            if tuple(value.shape) != (out, inp):
                raise CheckpointError(f"{self.what}: {name} has shape {list(value.shape)}, expected {[out, inp]}")
            self.taken.add(name)
            weight = value.to(self.device)
        else:
            weight = self._checked(name, value, (out, inp), dtype)
        return Linear(weight, self.take(f"{prefix}.bias", (weight.shape[0],), dtype))

    def norm(self, prefix: str, width: int) -> Norm:
        return Norm(self.take(f"{prefix}.weight", (width,)), self.take(f"{prefix}.bias", (width,)))

    def count(self, prefix: str, leaf: str) -> int:
        """How many of prefix.0.leaf, prefix.1.leaf, ... there are; they must be numbered without a gap."""
        pattern = re.compile(rf"{re.escape(prefix)}\.(\d+)\.{re.escape(leaf)}")
        numbers = sorted(int(match[1]) for match in map(pattern.fullmatch, self.tensors) if match)
        if numbers != list(range(len(numbers))):
            raise CheckpointError(f"{self.what}: {prefix}.*.{leaf} is numbered {numbers}, expected 0, 1, 2, ...")
        return len(numbers)

    def refuse_leftovers(self, prefix: str) -> None:
        """A tensor inside the blocks that nothing read belongs to another architecture: refuse, do not ignore."""
        left = sorted(name for name in self.tensors if name.startswith(prefix) and name not in self.taken)
        if left:
            raise CheckpointError(
                f"{self.what}: {len(left)} tensors under {prefix} are not part of this architecture, "
                f"such as {', '.join(left[:3])}"
            )

    def _find(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.what}: no tensor {name} among {len(self.tensors)}")
        return self.tensors[name]


def moved(weights, device: torch.device):
    """A copy of nested frozen dataclasses and tuples with every tensor on `device`."""
    if isinstance(weights, torch.Tensor):
        return weights.to(device)
    if isinstance(weights, tuple):
        return tuple(moved(item, device) for item in weights)
    if is_dataclass(weights):
        values = {field.name: moved(getattr(weights, field.name), device) for field in fields(weights)}
        return replace(weights, **values)
    return device if isinstance(weights, torch.device) else weights


def nbytes(weights) -> int:
    """Bytes of every tensor in nested frozen dataclasses and tuples."""
    if isinstance(weights, torch.Tensor):
        return weights.nbytes
    if isinstance(weights, tuple):
        return sum(map(nbytes, weights))
    return sum(nbytes(getattr(weights, field.name)) for field in fields(weights)) if is_dataclass(weights) else 0
