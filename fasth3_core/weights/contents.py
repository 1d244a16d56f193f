"""What of a transformer is kept and in which form, from its headers alone."""

from collections.abc import Mapping

import torch

from ..checkpoint.kinds import Entry, Plan
from ..config import DiTConfig
from . import policy
from .blocks import by_block
from .fp8 import FP8, fp8_entries
from .placement import Sizes

GATE = "attn.to_gate_compress.weight"
"""Of a block."""

_ADALN = "adaln_proj."
"""Of a block: two fifths of the released model, read once for each schedule and not kept."""

_TEXT = ("condition_proj.", "token_refiner.")
"""Read by a request once, before its forwards: 1.5 GB of the released model in bf16."""


class Contents:
    """Entries by where they go, blocks under names relative to them."""

    def __init__(self, plan: Plan, config: DiTConfig, dtype: str) -> None:
        """`dtype`: see `FileStore`. Raises ConfigError if it is none."""
        policy.check_dtype(dtype)
        self._dtype = dtype
        self._adaln = config.adaln
        self._stored = policy.stored_dtype(plan.entries, config.adaln)
        self._wide = dtype != FP8 and any(spec.format.startswith("float8") for spec in plan.quantised.values())
        top, blocks = by_block(fp8_entries(plan.entries) if dtype == FP8 else plan.entries, config.num_layers)
        self.text: Mapping[str, Entry] = {n: entry for n, entry in top.items() if n.startswith(_TEXT)}
        self.top: Mapping[str, Entry] = {n: entry for n, entry in top.items() if n not in self.text}
        self.blocks: list[Mapping[str, Entry]] = [
            {n: entry for n, entry in block.items() if not n.startswith(_ADALN)} for block in blocks
        ]
        self.adaln: list[Mapping[str, Entry]] = [
            {n: entry for n, entry in block.items() if n.startswith(_ADALN)} for block in blocks
        ]

    @property
    def fp8(self) -> bool:
        """Whether the products of the blocks take both sides in fp8."""
        return self._dtype == FP8

    @property
    def widened_bytes(self) -> int:
        """Bytes that a value of a quantised weight takes while it is dequantised for a product; 0 without any."""
        return 8 if self._wide else 0  # float8 files go through fp32 as a whole, int8 weights are never wide as a whole

    def run_dtype(self, device: torch.device) -> torch.dtype:
        """Of the residual stream."""
        return policy.run_dtype(self._dtype, self._stored, device)

    def dtype_of(self, name: str, run: torch.dtype) -> torch.dtype:
        """Of one weight in a run whose residual stream is `run`."""
        return policy.weight_dtype(name, self._adaln, run)

    def nbytes(self, entries: Mapping[str, Entry], run: torch.dtype) -> int:
        return sum(entry.nbytes(self.dtype_of(name, run)) for name, entry in entries.items())

    def sizes(self, run: torch.dtype) -> Sizes:
        return Sizes(
            top=self.nbytes(self.top, run), text=self.nbytes(self.text, run),
            blocks=tuple(self.nbytes(block, run) for block in self.blocks),
        )
