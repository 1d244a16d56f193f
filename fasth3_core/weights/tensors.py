"""Weights that are already tensors: what tests, self-tests and benchmarks run a transformer on."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch

from ..config import DiTConfig
from ..model.handle import BuildTable, Tables
from .blocks import by_block
from .parts import any_nonzero


class TensorStore:
    """A weight store over a dict of canonical tensors, all on one device and in their final dtypes."""

    head_form = "residual"

    def __init__(self, tensors: Mapping[str, torch.Tensor], overrides: Mapping[str, object] | None = None) -> None:
        """Raises CheckpointError if the tensors are not a whole transformer."""
        self.config = DiTConfig.from_shapes({name: tuple(t.shape) for name, t in tensors.items()}, overrides)
        self._top, self._blocks = by_block(tensors, self.config.num_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._top["final_layer.norm.weight"].dtype

    def dtype_on(self, device: torch.device) -> torch.dtype:
        return self.dtype

    def materialise(
        self,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        check_interrupt: Callable[[], None] | None = None,
    ) -> None:
        for group in (self._top, *self._blocks):
            group.update({name: tensor.to(device) for name, tensor in group.items()})

    def top(self) -> Mapping[str, torch.Tensor]:
        return MappingProxyType(self._top)

    def text(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        return nullcontext(self.top())

    def block_tables(self, key: Hashable, build: BuildTable) -> Tables:
        return tuple(build(block) for block in self._blocks)

    def block(self, index: int) -> Mapping[str, torch.Tensor]:
        return MappingProxyType(self._blocks[index])

    def use(self, index: int) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        return nullcontext(self.block(index))

    def gated(self) -> tuple[bool, ...]:
        gates = (block.get("attn.to_gate_compress.weight") for block in self._blocks)
        return tuple(gate is not None and any_nonzero(gate) for gate in gates)

    def traffic(self) -> dict[str, object]:
        return {}
