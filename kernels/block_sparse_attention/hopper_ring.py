"""What the warps of the Hopper path share: sizes, and the ring of stages through which keys and values come.

Stage j carries K of step j and V of step j - 1, because the two products that run together are those. A list of T steps
(steps.py) takes T + 1 stages. Keys and values that are not of the list may come along, NaN among them: who multiplies
replaces their logits, and clears their values, because zero times NaN is NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from . import steps

TILE = gl.constexpr(steps.STEP.value)
HEAD_DIM = gl.constexpr(128)
GRANULE = gl.constexpr(steps.GRANULE.value)
PER_STEP = gl.constexpr(steps.STEP.value // steps.GRANULE.value)
KIND_MASK = gl.constexpr(steps.KIND_MASK.value)
ATOM = gl.constexpr(64)
"""Columns of a swizzle atom: 128 bytes of a 16-bit type. The second half of all rows of a tile follows the first in
memory."""

RENAMED = gl.constexpr(hasattr(tma, "async_load"))
"""Gluon after Triton 3.6 has other names for some functions that are used here."""

barrier = gl.barrier if RENAMED.value else gl.thread_barrier

LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The running maximum before the first key. Not -inf: a list without keys then has exponentials of 0 and no NaN."""


@gluon.jit
def view(smem, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same memory in another shape, laid out in another way."""
    if RENAMED:
        return smem.reinterpret(smem.dtype, SHAPE, LAYOUT)
    else:
        return smem._reinterpret(smem.dtype, SHAPE, LAYOUT)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The following stage of a ring and the phase in which it is used."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def listed(codes_ptr, layout: gl.constexpr, masked=True):
    """[64] of a step: which of its keys are of the list. All, if it is not a masked step."""
    key = gl.arange(0, TILE, layout)
    code = gl.load(codes_ptr + key // GRANULE, mask=(key < TILE) & masked, other=GRANULE)
    return key % GRANULE < (code & KIND_MASK)


@gluon.jit
def clear_unlisted(v_stage, codes_ptr):
    """Zero the values of a step [64, 128] that are not of the list."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    v = v_stage.load(LAYOUT)
    v_stage.store(gl.where(listed(codes_ptr, gl.SliceLayout(1, LAYOUT))[:, None], v, gl.zeros_like(v)))
    fence_async_shared()  # the tensor cores, and later the copy engine, see shared memory through another proxy
    barrier()
