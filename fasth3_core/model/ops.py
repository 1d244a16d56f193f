"""The token-wise operations of the transformer, as one run uses them."""

from dataclasses import dataclass, fields
from functools import cached_property

from ...kernels import registry
from ...kernels.device import Case
from ...kernels.registry import Resolved


@dataclass(frozen=True)
class TokenOps:
    """The implementations that one run uses. Each counts its calls."""

    backend: str
    case: Case
    rms_modulate: Resolved
    residual_rms_modulate: Resolved
    gated_residual: Resolved
    qk_norm_rope: Resolved
    swiglu: Resolved

    # those of quantised weights are decided when the first of their kind comes by: a run without asks for none

    @cached_property
    def int8_linear(self) -> Resolved:
        return registry.follow("int8_linear", self.backend, self.case)

    @cached_property
    def fp8_linear(self) -> Resolved:
        return registry.follow("fp8_linear", self.backend, self.case)

    @cached_property
    def quantise_rows(self) -> Resolved:
        return registry.follow("quantise_rows", self.backend, self.case)

    def table(self) -> list[dict]:
        """A row per op: implementation, calls, reasons of those refused."""
        return registry.table(op for op in vars(self).values() if isinstance(op, Resolved))


def resolve_token_ops(backend: str, case: Case) -> TokenOps:
    """Decide once per run.

    Args:
        backend: "auto", or the name chosen for attention: an op that has an implementation of that name must then run
            it, one that has none takes its best.

    Raises:
        BackendUnavailable: a named implementation cannot run, with every reason.
    """
    ops = [field.name for field in fields(TokenOps) if field.name not in ("backend", "case")]
    return TokenOps(backend, case, **{op: registry.follow(op, backend, case) for op in ops})
