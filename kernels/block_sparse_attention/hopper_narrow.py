"""The multiplying warps of the Hopper path, for query tiles of at most 16 or 32 rows.

A warp-group product has 64 rows but may have as few as 8 columns, and the energy that idle rows take is missing
elsewhere. So the products are transposed here: queries are columns; keys, then channels of the result, are rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_ring import ATOM, HEAD_DIM, LOWEST, PER_STEP, TILE, barrier, clear_unlisted, listed, next_stage, view


@gluon.jit
def _scores(k_stage, q, zeros):
    """Start K Q^T of a step [64, N]: one product for each half of the head channels."""
    q_left, q_right = q
    TILE_LAYOUT: gl.constexpr = k_stage.layout
    halves = view(k_stage, [2, TILE, ATOM], TILE_LAYOUT)
    s = warpgroup_mma(halves.index(0), q_left.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(halves.index(1), q_right.permute((1, 0)), s, is_async=True)


@gluon.jit
def _softmax(s, m, sums, scale):
    """Online softmax of logits s [64, N] over the keys: exponentials, running maximum [N], sums [64, N] that are added
    up at the end, factor for what came before [N]."""
    m_new = gl.maximum(m, gl.max(s, 0) * scale)
    e = gl.exp2(s * scale - m_new[None, :])
    alpha = gl.exp2(m - m_new)
    return e, m_new, sums * alpha[None, :] + e, alpha


@gluon.jit
def _step(q, p_smem, acc, m, sums, stage, phase, zeros, ring, codes_ptr, scale, MASKED: gl.constexpr):
    """One stage that has arrived: QK^T of its step beside PV of the step before, then softmax."""
    k_smem, v_smem, full, empty = ring
    s_pending = _scores(k_smem.index(stage), q, zeros)
    acc_pending = warpgroup_mma(v_smem.index(stage).permute((1, 0)), p_smem, acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_pending,))
    if MASKED:
        s = gl.where(listed(codes_ptr, gl.SliceLayout(1, s.type.layout))[:, None], s, float("-inf"))
    e, m, sums, alpha = _softmax(s, m, sums, scale)
    acc = warpgroup_mma_wait(0, deps=(acc_pending,))
    mbarrier.arrive(empty.index(stage), count=1)
    p_smem.store(e.to(p_smem.dtype))
    fence_async_shared()
    barrier()
    stage, phase = next_stage(stage, phase, k_smem.type.shape[0])
    mbarrier.wait(full.index(stage), phase)
    if MASKED:
        clear_unlisted(v_smem.index(stage), codes_ptr)
    return acc * alpha[None, :], m, sums, stage, phase


@gluon.jit
def attend_narrow(q_smem, ring, codes_ptr, masked, steps, scale, result, N: gl.constexpr):
    """One list of at most N queries, which have arrived. Takes the same `result` as `attend_wide`."""
    k_smem, v_smem, full, empty = ring
    STAGES: gl.constexpr = k_smem.type.shape[0]
    dtype: gl.constexpr = k_smem.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    TILE_LAYOUT: gl.constexpr = q_smem.layout
    # 64 rows were brought, of which N count: P goes where the left halves of the others are
    parts = view(q_smem, [2 * TILE // N, N, ATOM], TILE_LAYOUT)
    q = (parts.index(0), parts.index(TILE // N))
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * N, element_bitwidth=16, rank=2)
    p_smem = view(q_smem, [HEAD_DIM // N, TILE, N], P_LAYOUT).index(HEAD_DIM // N // 4)
    zeros = gl.zeros([TILE, N], gl.float32, LAYOUT)
    sums = gl.zeros([TILE, N], gl.float32, LAYOUT)
    acc = gl.zeros([HEAD_DIM, N], gl.float32, LAYOUT)
    m = gl.full([N], LOWEST, gl.float32, COLUMNS)

    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(_scores(k_smem.index(0), q, zeros),))
    mbarrier.arrive(empty.index(0), count=1)
    s = gl.where(listed(codes_ptr, gl.SliceLayout(1, LAYOUT), masked > 0)[:, None], s, float("-inf"))
    e, m, sums, _ = _softmax(s, m, sums, scale)
    p_smem.store(e.to(dtype))
    fence_async_shared()
    barrier()
    stage, phase = next_stage(0, 0, STAGES)
    mbarrier.wait(full.index(stage), phase)
    if masked > 0:
        clear_unlisted(v_smem.index(stage), codes_ptr)

    for step in range(1, masked):
        codes = codes_ptr + step * PER_STEP
        acc, m, sums, stage, phase = _step(q, p_smem, acc, m, sums, stage, phase, zeros, ring, codes, scale, True)
    for _step_number in range(gl.maximum(masked, 1), steps):
        acc, m, sums, stage, phase = _step(q, p_smem, acc, m, sums, stage, phase, zeros, ring, codes_ptr, scale, False)

    acc = warpgroup_mma(v_smem.index(stage).permute((1, 0)), p_smem, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    l = gl.sum(sums, 0)
    acc = acc / gl.where(l == 0.0, 1.0, l)[None, :]
    out_ptr, stride_om, stride_od, size = result
    query = gl.arange(0, N, COLUMNS)
    channel = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, LAYOUT))
    line_ptr = out_ptr + query.to(gl.int64) * stride_om
    gl.store(line_ptr[None, :] + (channel * stride_od)[:, None], acc.to(dtype), mask=(query < size)[None, :])
