"""The token-wise operations of the transformer, as one run uses them."""

from dataclasses import dataclass

from ...kernels import registry
from ...kernels.device import Case
from ...kernels.registry import Resolved


@dataclass(frozen=True)
class TokenOps:
    """The implementations that one run uses. Each counts its calls."""

    rms_modulate: Resolved
    residual_rms_modulate: Resolved
    gated_residual: Resolved
    qk_norm_rope: Resolved
    swiglu: Resolved

    def table(self) -> list[dict]:
        """A row per op: implementation, calls, reasons of those refused."""
        return registry.table(vars(self).values())


def resolve_token_ops(backend: str, case: Case) -> TokenOps:
    """Decide once per run.

    Args:
        backend: "auto", or the name chosen for attention: an op that has an implementation of that name must then run
            it, one that has none takes its best.

    Raises:
        BackendUnavailable: a named implementation cannot run, with every reason.
    """
    return TokenOps(**{
        op: registry.resolve(op, backend if backend in registry.names(op) else "auto", case)
        for op in TokenOps.__dataclass_fields__
    })
