"""The device code of the Hopper path, in Gluon: explicit copies, barriers and matrix instructions.

A program takes one query tile of one head; two programs share a multiprocessor. One warp walks the packed list and
keeps a ring of stages filled (hopper_copy.py); four warps compute QK^T, softmax and PV. While the tensor cores multiply
P of step j - 1 with V, the softmax of step j is computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_copy import GRANULE, HEAD_DIM, KIND_MASK, PER_STEP, TILE, copy_list, next_stage

LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The running maximum before the first key. Not -inf: a list without keys then has exponentials of 0 and no NaN."""


@gluon.jit
def _listed(codes_ptr, layout: gl.constexpr, masked=True):
    """[64] of a step: which of its keys are of the list. All, if it is not a masked step."""
    key = gl.arange(0, TILE, layout)
    code = gl.load(codes_ptr + key // GRANULE, mask=(key < TILE) & masked, other=GRANULE)
    return key % GRANULE < (code & KIND_MASK)


@gluon.jit
def _clear_unlisted(v_stage, codes_ptr):
    """Zero the values of a step [64, 128] that are not of the list."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    v = v_stage.load(LAYOUT)
    v_stage.store(gl.where(_listed(codes_ptr, gl.SliceLayout(1, LAYOUT))[:, None], v, gl.zeros_like(v)))
    fence_async_shared()  # the tensor cores, and later the copy engine, see shared memory through another proxy


@gluon.jit
def _softmax(s, m, l, scale):
    """Online softmax of logits s [64, 64]: exponentials, running maximum and sum [64], factor for what came before."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    e = gl.exp2(s * scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return e, m_new, l * alpha + gl.sum(e, 1), alpha


@gluon.jit
def _step(q, p, acc, m, l, stage, phase, zeros, k_smem, v_smem, full, empty, codes_ptr, scale, MASKED: gl.constexpr):
    """One stage that has arrived: QK^T of its step beside PV of the step before, softmax under the latter."""
    s_pending = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc_pending = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_pending,))
    if MASKED:
        s = gl.where(_listed(codes_ptr, gl.SliceLayout(0, s.type.layout))[None, :], s, float("-inf"))
    e, m, l, alpha = _softmax(s, m, l, scale)
    p_next = gl.convert_layout(e.to(p.dtype), p.type.layout)
    # Waiting for the next stage here, and naming what the softmax made below, keeps the assembler from moving the wait
    # for PV in front of the exponentials: it does not see that they are meant to overlap.
    following, following_phase = next_stage(stage, phase, k_smem.type.shape[0])
    mbarrier.wait(full.index(following), following_phase)
    if MASKED:
        _clear_unlisted(v_smem.index(following), codes_ptr)
    acc, p, p_next, l = warpgroup_mma_wait(0, deps=(acc_pending, p, p_next, l))
    mbarrier.arrive(empty.index(stage), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    return p_next, acc, m, l, following, following_phase


@gluon.jit
def _multiply_warps(
    q_smem, q_full, k_smem, v_smem, full, empty, out_ptr, stride_om, stride_od, codes_ptr, steps_ptr, size, scale
):
    STAGES: gl.constexpr = k_smem.type.shape[0]
    dtype: gl.constexpr = k_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    zeros = gl.zeros([TILE, TILE], gl.float32, S_LAYOUT)
    masked = gl.load(steps_ptr)
    steps = gl.load(steps_ptr + 2)
    mbarrier.wait(q_full, 0)
    q = q_smem.load(gl.DotOperandLayout(0, S_LAYOUT, 2))  # [64, 128]

    # step 0: no PV to run beside
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))  # [64, 64]
    mbarrier.arrive(empty.index(0), count=1)
    s = gl.where(_listed(codes_ptr, gl.SliceLayout(0, S_LAYOUT), masked > 0)[None, :], s, float("-inf"))
    m = gl.full([TILE], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    e, m, l, _ = _softmax(s, m, gl.zeros_like(m), scale)
    p = gl.convert_layout(e.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))  # [64, 64]
    acc = gl.zeros([TILE, HEAD_DIM], gl.float32, O_LAYOUT)
    stage, phase = next_stage(0, 0, STAGES)
    mbarrier.wait(full.index(stage), phase)
    if masked > 0:
        _clear_unlisted(v_smem.index(stage), codes_ptr)

    for step in range(1, masked):
        p, acc, m, l, stage, phase = _step(
            q, p, acc, m, l, stage, phase, zeros, k_smem, v_smem, full, empty, codes_ptr + step * PER_STEP, scale, True
        )
    for _step_number in range(gl.maximum(masked, 1), steps):
        p, acc, m, l, stage, phase = _step(
            q, p, acc, m, l, stage, phase, zeros, k_smem, v_smem, full, empty, codes_ptr, scale, False
        )

    # PV of the last step, whose stage carries no K
    acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    l = gl.convert_layout(l, O_ROWS, assert_trivial=True)
    acc = acc / gl.where(l == 0.0, 1.0, l)[:, None]
    # a short query tile is followed by another one's rows: they were computed, and are not stored
    row = gl.arange(0, TILE, O_ROWS)
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O_LAYOUT))
    line_ptr = out_ptr + row.to(gl.int64) * stride_om
    gl.store(line_ptr[:, None] + (column * stride_od)[None, :], acc.to(dtype), mask=(row < size)[:, None])


@gluon.jit(do_not_specialize=["V", "K", "num_prefix"])
def attention_kernel(
    q_tiles, k_tiles, k_fours, k_pairs, k_ones, v_tiles, v_fours, v_pairs, v_ones, q_head, k_head, v_head,
    out_ptr, stride_om, stride_oh, stride_od, offsets_ptr, codes_ptr, rows_ptr, steps_ptr,
    V, K, num_prefix, scale, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program n takes query tile n % V of head n // V. `*_head`: columns from one head to the next."""
    dtype: gl.constexpr = k_tiles.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [TILE, HEAD_DIM], q_tiles.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)

    item = gl.program_id(0)
    head = item // V
    tile_ptr = offsets_ptr + num_prefix + item - head * V
    row = gl.load(tile_ptr) - gl.load(offsets_ptr + num_prefix)  # of the video tokens, which is what q has
    size = gl.load(tile_ptr + 1) - gl.load(tile_ptr)
    out_ptr += row.to(gl.int64) * stride_om + head.to(gl.int64) * stride_oh
    codes_ptr += item.to(gl.int64) * K * PER_STEP
    rows_ptr += item.to(gl.int64) * K
    steps_ptr += item * 3
    gl.warp_specialize(
        [
            (_multiply_warps, (
                q_smem, q_full, k_smem, v_smem, full, empty,
                out_ptr, stride_om, stride_od, codes_ptr, steps_ptr, size, scale,
            )),
            (copy_list, (
                q_tiles, k_tiles, k_fours, k_pairs, k_ones, v_tiles, v_fours, v_pairs, v_ones, q_head, k_head, v_head,
                q_smem, q_full, k_smem, v_smem, full, empty, codes_ptr, rows_ptr, steps_ptr, head, row,
            )),
        ],
        [1], [COPY_REGISTERS],
    )  # fmt: skip
