"""dense_attention: every query sees every key."""

import torch

from ..device import Case
from ..registry import Impl, register, resolve
from .eager import dense_attention_eager
from .reference import dense_attention_reference

__all__ = ["dense_attention", "dense_attention_eager", "dense_attention_reference"]


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Softmax attention.

    Args:
        q: [M, H, D].
        k, v: [S, H, D], q's dtype. All three may be strided views; the last dimension is contiguous.
        out: [M, H, D] to write to, any strides; a new tensor if None. It may be q itself, which is then lost; it
            overlaps nothing else.

    Returns:
        [M, H, D] in q's dtype: `out`, or possibly a transposed view.

    Raises:
        BackendUnavailable: the named backend cannot take q.
    """
    return resolve("dense_attention", backend, Case.of(q))(q, k, v, out=out)


register(Impl(op="dense_attention", name="eager", rank=50, load=lambda: dense_attention_eager))
register(Impl(op="dense_attention", name="reference", rank=100, load=lambda: dense_attention_reference))
