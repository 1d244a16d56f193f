"""block_sparse_attention: each video query tile attends to the tiles of its own list, per head."""

from dataclasses import replace

import torch

from ..device import Case, failure_of, hopper_why_not, triton_why_not
from ..registry import Impl, register, resolve
from .eager import block_sparse_attention_eager
from .reference import block_sparse_attention_reference
from .sm100a import block_sparse_attention_sm100a, sm100a_why_not

__all__ = ["block_sparse_attention", "block_sparse_attention_eager", "block_sparse_attention_reference"]


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    index: torch.Tensor,
    count: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    byte_budget: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Exact softmax attention over the tokens of the listed tiles.

    Args:
        q: [M, H, D], the video tokens alone, in tile order: the rows that follow the prefix.
        k, v: [S, H, D], all tokens in tile order, q's dtype. Any strides with a contiguous last dimension, so slices
            of one fused projection are fine. Tokens outside a list are never read into its result, NaN included.
        offsets: [N + 1] int32 tile ranges over the S tokens; the last V tiles are the M video tokens.
        index: [H, V, K] int32 tile numbers, ascending, -1 after the count.
        count: [H, V] int32, how many of the K are valid. Zero gives rows of exact zeros.
        out: [M, H, D] to write to, any strides, q's dtype; a new tensor if None. It may be q itself, which is then
            lost: a query tile is read by nobody else before its rows are written. It overlaps nothing else.
        byte_budget: bytes of gathered keys and values at a time, for implementations that gather; None for their own
            choice by device.

    Returns:
        [M, H, D] in q's dtype.

    Raises:
        BackendUnavailable: the named backend cannot take q.
    """
    case = replace(Case.of(q), grad=any(Case.of(x).grad for x in (q, k, v)))
    run = resolve("block_sparse_attention", backend, case)
    return run(q, k, v, offsets, index, count, out=out, byte_budget=byte_budget)


def portable_why_not(case: Case) -> str | None:
    """Why the portable Triton kernel cannot take this case."""
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, got {case.dtype}"
    if case.head_dim not in (64, 128):
        return f"needs a head dim of 64 or 128, got {case.head_dim}"
    if case.tile_size > 64:
        return f"needs tiles of at most 64 tokens, got {case.tile_size}"
    if (why := triton_why_not(case)) is not None:
        return why
    if case.device.type == "cuda" and case.dtype == torch.bfloat16:
        major, minor = torch.cuda.get_device_capability(case.device)
        if major < 8:
            return f"bf16 products need compute capability 8.0, got {major}.{minor}"
    return None


def _load_triton():
    from .triton_kernel import block_sparse_attention_triton

    return block_sparse_attention_triton


def gluon_why_not(case: Case) -> str | None:
    """Why the Hopper kernel cannot take this case. The last question, asked once per device, runs a small case."""
    if (why := hopper_why_not(case)) is not None:
        return why
    if case.head_dim != 128:
        return f"needs a head dim of 128, got {case.head_dim}"
    if case.tile_size > 64:
        return f"needs tiles of at most 64 tokens, got {case.tile_size}"
    return failure_of(f"{__package__}.hopper_kernel", case.device, case.dtype)


def _load_hopper():
    from .hopper_kernel import block_sparse_attention_hopper

    return block_sparse_attention_hopper


register(
    Impl(
        op="block_sparse_attention", name="sm100a", rank=1, opt_in="FASTVIDEO_VSA_SM100A",
        load=lambda: block_sparse_attention_sm100a, why_not=sm100a_why_not,
    )
)
register(Impl(op="block_sparse_attention", name="hopper", rank=5, load=_load_hopper, why_not=gluon_why_not))
register(Impl(op="block_sparse_attention", name="triton", rank=10, load=_load_triton, why_not=portable_why_not))
register(Impl(op="block_sparse_attention", name="eager", rank=50, load=lambda: block_sparse_attention_eager))
register(Impl(op="block_sparse_attention", name="reference", rank=100, load=lambda: block_sparse_attention_reference))
