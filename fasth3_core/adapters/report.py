"""Key by key, what became of an adapter."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..checkpoint.problems import starred
from ..report.run_report import ADAPTER_OUTCOMES

MERGED, BESIDE, CREATED, UNMATCHED = ADAPTER_OUTCOMES


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of the file, or a pair of factors with its alpha."""

    key: str
    """Its name in the file; of a pair, the first."""
    outcome: str
    target: str
    """Canonical tensor that it changes; empty when unmatched."""
    detail: str
    """Rank and scale, or why it is unmatched."""
    tensors: int = 1


@dataclass(frozen=True, slots=True)
class AdapterReport:
    name: str
    strength: float
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    def count(self, outcome: str) -> int:
        return sum(row.tensors for row in self.rows if row.outcome == outcome)

    @property
    def matched(self) -> int:
        return sum(row.tensors for row in self.rows if row.outcome != UNMATCHED)

    def summary(self) -> str:
        total = sum(row.tensors for row in self.rows)
        parts = [f"{self.count(o)} {o}" for o in ADAPTER_OUTCOMES if self.count(o)]
        return f"{self.name} at {self.strength:g}: {self.matched} of {total} tensors used ({', '.join(parts)})"

    def details(self) -> dict[str, Any]:
        """What the run's report says of it."""
        return {
            "name": self.name,
            "strength": self.strength,
            **{outcome: self.count(outcome) for outcome in ADAPTER_OUTCOMES},
            "scales": sorted({row.detail for row in self.rows if "scale" in row.detail}),
            "not_used": list(grouped(row for row in self.rows if row.outcome == UNMATCHED)),
            "warnings": list(self.warnings),
        }

    def to_text(self, every_key: bool = True) -> str:
        """The summary, the warnings, and a line for each key, or for each kind of them."""
        lines = [self.summary(), *(f"warning: {text}" for text in self.warnings)]
        if not every_key:
            return "\n".join([*lines, *(f"  {line}" for line in grouped(self.rows))])
        return "\n".join([*lines, *(f"  {_line(r.key, r.outcome, r.target, r.detail)}" for r in self.rows)])


def grouped(rows: Iterable[Row]) -> Iterator[str]:
    """Rows that differ in the number of a block alone, as one line."""
    kinds: Counter[tuple[str, str, str, str]] = Counter()
    for row in rows:
        kinds[starred(row.key), row.outcome, starred(row.target), row.detail] += row.tensors
    for (key, outcome, target, detail), count in kinds.items():
        yield f"{count} x {_line(key, outcome, target, detail)}"


def _line(key: str, outcome: str, target: str, detail: str) -> str:
    return f"{key}: {outcome}{f' -> {target}' if target else ''} ({detail})"
