"""What the loader node hands to the sampler."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..config import DiTConfig
from ..contracts import Contract

Tables = tuple[tuple[torch.Tensor, ...], ...]
BuildTable = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]]


class WeightStore(Protocol):
    """Where the weights of one transformer come from. Names are canonical (single-file)."""

    config: DiTConfig

    @property
    def head_form(self) -> str:
        """How a bank of output heads is stored; see `head_bank.FORMS`."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream, once materialised."""

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """What `dtype` will be on this device."""

    def materialise(
        self,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        check_interrupt: Callable[[], None] | None = None,
    ) -> None: ...

    def top(self) -> Mapping[str, torch.Tensor]:
        """Everything outside the main blocks that every forward needs."""

    def text(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """What refines a prompt, `condition_proj` and `token_refiner`, on the device for the length of a `with`."""

    def use(self, index: int) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """One main block without its AdaLN, names relative to it, on the device for the length of a `with`: memory
        that streamed weights pass through is another block's afterwards."""

    def gated(self) -> tuple[bool, ...]:
        """Per block: whether it has a gate that is not all zero."""

    def traffic(self) -> Mapping[str, Any]:
        """For the report: where the blocks are kept, and what was streamed since the last call."""

    def block_tables(self, key: Hashable, build: BuildTable) -> Tables:
        """AdaLN tables of every block, [block][step]: `build` is called once a block with the block's AdaLN weights.

        A store may keep what it built for a key, which says all that the tables depend on but the weights.
        """


@dataclass(frozen=True)
class H3Model:
    """A transformer with the contract it was distilled for. Immutable: settings never change a loaded model."""

    config: DiTConfig
    """Also what a plan without files goes by, which has no store."""
    contract: Contract
    store: WeightStore
    source: str
    """File or folder it came from, for the report."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else the report should say: layout, quantisation, adapters."""
    departures: tuple[str, ...] = ()
    """Where the contract that was asked for differs from what the files say of themselves."""
    opened: Any = None
    """`checkpoint.load.Opened`: the files behind the store, to which an adapter is applied. None for a model that was
    made from tensors in memory."""
