"""bounded_attention: softmax attention of normalised heads, whose logits cannot leave a known range."""

import torch

from ..device import Case, triton_why_not
from ..registry import Impl, register, resolve
from .eager import bounded_attention_eager
from .reference import bounded_attention_reference

__all__ = ["bounded_attention", "bounded_attention_eager", "bounded_attention_reference"]


def bounded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, *, backend: str = "auto"
) -> torch.Tensor:
    """Softmax attention inside each sequence.

    Args:
        q, k: [S, H, D] whose heads have a root mean square of at most 1, so that q k / sqrt(D) is within +-sqrt(D).
            A kernel relies on that: it subtracts no maximum, and the weight e^sqrt(D) has to fit the dtype.
        v: [S, H, D], q's dtype. All three may be slices of one product; the last dimension is contiguous.
        length: tokens of a sequence; divides S.

    Returns:
        [S, H * D] in q's dtype.

    Raises:
        BackendUnavailable: the named backend cannot take q.
    """
    return resolve("bounded_attention", backend, Case.of(q))(q, k, v, length)


def bounded_why_not(case: Case) -> str | None:
    """16 to 64 channels: with 128 the largest weight, e^11.3, would not fit fp16. On Hopper alone, where it was
    measured; compiled for sm_75 its blocks spill 4 KB a thread."""
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"needs fp16 or bf16, got {case.dtype}"
    if case.head_dim not in (16, 32, 64):
        return f"needs a head dim of 16, 32 or 64, got {case.head_dim}"
    if case.device.type == "cuda":
        if torch.version.hip is not None:
            return "needs an NVIDIA GPU, got ROCm"
        major, minor = torch.cuda.get_device_capability(case.device)
        if (major, minor) != (9, 0):
            return f"measured on compute capability 9.0 alone, got {major}.{minor}: torch's attention runs"
    return triton_why_not(case)


def _load_triton():
    from .triton_kernel import bounded_attention_triton

    return bounded_attention_triton


register(Impl(op="bounded_attention", name="triton", rank=10, load=_load_triton, why_not=bounded_why_not))
register(Impl(op="bounded_attention", name="eager", rank=50, load=lambda: bounded_attention_eager))
register(Impl(op="bounded_attention", name="reference", rank=100, load=lambda: bounded_attention_reference))
