"""Which implementation of an op runs. The only place that decides, and the only place that reports it.

Every op has a "reference" (plain torch, fp32 arithmetic, runs anywhere) and any number of faster implementations.
An implementation says in `why_not(case)` why it cannot take a case, or None if it can.

    backend="auto"      the best one that can run; every refusal is kept, with its reason, and logged once
    backend="<name>"    exactly that one, or BackendUnavailable: an explicit request never falls back

The decision is made once per run: `resolve` returns an object that the caller keeps and calls.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from .device import Case, opted_in

log = logging.getLogger("fasth3.kernels")


@dataclass(frozen=True, kw_only=True)
class Impl:
    op: str
    name: str
    rank: int
    """Lower is tried first. "reference" is 100."""
    load: Callable[[], Callable[..., Any]]
    """Imports and returns the function. Called only after why_not() returned None; an ImportError is a refusal."""
    why_not: Callable[[Case], str | None] = lambda case: None
    """Cheap, no side effects, never launches work."""
    opt_in: str = ""
    """Environment variable that has to be 1 before "auto" may try this one; empty: always. A name needs no variable."""


class BackendUnavailable(RuntimeError):
    """No implementation may run: `refused` has the reason of each that was asked for."""

    def __init__(self, op: str, backend: str, refused: dict[str, str]):
        self.op, self.backend, self.refused = op, backend, refused
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        super().__init__(f"{op}: backend {backend!r} cannot run here ({reasons}). Use 'auto' to allow others.")


@dataclass
class Resolved:
    """One op as one run uses it: call it like the function. Belongs to the run, and so does its count."""

    op: str
    name: str
    function: Callable[..., Any]
    refused: dict[str, str] = field(default_factory=dict)
    """Better-ranked implementation -> why it cannot take this case."""
    calls: int = 0
    in_graph: Callable[..., Any] | None = None
    """(name, *the function's arguments): what torch.compile puts into a graph. None: it looks into the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.in_graph is not None:
            return self.in_graph(self.name, *args, **kwargs)
        self.calls += 1
        return self.function(*args, **kwargs)


_IMPLS: dict[str, list[Impl]] = {}
_IN_GRAPH: dict[str, Callable[..., Any]] = {}
_LOGGED: set[tuple[str, str, str]] = set()


def register(impl: Impl) -> None:
    """Add an implementation. Raises ValueError if the op has one of that name."""
    rows = _IMPLS.setdefault(impl.op, [])
    if impl.name in (row.name for row in rows):
        raise ValueError(f"{impl.op}: {impl.name!r} is already registered")
    rows.append(impl)
    rows.sort(key=lambda row: row.rank)


def traced(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function that stands for `op` in a graph: see `Resolved.in_graph`."""
    return partial(_IN_GRAPH.setdefault, op)


def loaded(op: str, name: str) -> Callable[..., Any]:
    """The function of an implementation that `resolve` chose before."""
    return _loaded(next(impl for impl in _IMPLS[op] if impl.name == name))


def names(op: str) -> tuple[str, ...]:
    """Implementations of `op`, best first."""
    return tuple(row.name for row in _IMPLS[op])


def resolve(op: str, backend: str, case: Case) -> Resolved:
    """Choose the implementation of `op` for a run.

    Args:
        backend: "auto" or a name. A name never falls back.
        case: what the op will be called with.

    Raises:
        BackendUnavailable: the named one cannot run or does not exist, or with "auto" none can.
    """
    refused: dict[str, str] = {}
    for impl in _IMPLS[op]:
        if backend not in ("auto", impl.name):
            continue
        if backend == "auto" and impl.opt_in and not opted_in(impl.opt_in):
            continue
        function, why = _try(impl, case)
        if why is None:
            return Resolved(op, impl.name, function, refused, in_graph=_IN_GRAPH.get(op))
        refused[impl.name] = why
        if backend == "auto" and (op, impl.name, why) not in _LOGGED:
            _LOGGED.add((op, impl.name, why))
            asked = f" in spite of {impl.opt_in}=1" if impl.opt_in else ""
            log.warning("%s: not using %s%s: %s", op, impl.name, asked, why)
    raise BackendUnavailable(op, backend, refused or {backend: f"unknown; {op} has {', '.join(names(op))}"})


def follow(op: str, backend: str, case: Case) -> Resolved:
    """`op` for a run that asks another op for `backend`: the implementation of that name, which must then run, or the
    best one where the op has none of that name."""
    return resolve(op, backend if backend in names(op) else "auto", case)


def table(resolved: Iterable[Resolved]) -> list[dict[str, Any]]:
    """What one run used: a row per op with its implementation, number of calls and the reasons of those refused."""
    return [{"op": r.op, "backend": r.name, "calls": r.calls, "refused": dict(r.refused)} for r in resolved]


def report(case: Case) -> list[dict[str, Any]]:
    """What this machine can run: a row per (op, implementation), best first, `why_not` None where it can."""
    return [
        {"op": op, "backend": row.name, "why_not": _try(row, case)[1]}
        for op, rows in sorted(_IMPLS.items())
        for row in rows
    ]


def _try(impl: Impl, case: Case) -> tuple[Callable[..., Any] | None, str | None]:
    if (why := impl.why_not(case)) is not None:
        return None, why
    try:
        return _loaded(impl), None
    except ImportError as error:
        return None, f"ImportError: {error}"


@cache
def _loaded(impl: Impl) -> Callable[..., Any]:
    return impl.load()
