"""Which modulation row each token takes: the same fact once as spans, for torch, and once per token, for kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Segments:
    """Built once per sampler step and used by every block of it."""

    spans: tuple[tuple[int, int, int], ...]
    """(start, stop, row) in order, covering [0, S)."""
    rows: torch.Tensor
    """[S] int32. 4 bytes a token beside the 10 KB that a kernel moves for it: cheaper than a search among the spans."""

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int]], device: torch.device | str) -> "Segments":
        """Raises ValueError if the spans leave a gap, overlap or are empty."""
        end = 0
        for start, stop, row in spans:
            if start != end or stop <= start or row < 0:
                raise ValueError(f"({start}, {stop}, row {row}) does not follow token {end} in {tuple(spans)}")
            end = stop
        rows = torch.empty(end, dtype=torch.int32, device=device)
        for start, stop, row in spans:
            rows[start:stop] = row
        return cls(tuple(spans), rows)

    def part(self, start: int, stop: int) -> "Segments":
        """Those of the tokens start to stop, counted from start."""
        inside = [(max(a, start), min(b, stop), row) for a, b, row in self.spans if a < stop and b > start]
        return Segments(tuple((a - start, b - start, row) for a, b, row in inside), self.rows[start:stop])
