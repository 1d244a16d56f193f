"""The multiplying warps of the Hopper path, for query tiles of more than 32 rows: 64 at a time by warp-group products.

While the tensor cores multiply P of step j - 1 with V, the softmax of step j is computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_rescale import rescale, running_maximum
from .hopper_ring import HEAD_DIM, LOWEST, PER_STEP, TILE, clear_unlisted, listed, next_stage


@gluon.jit
def _thread_sums(e):
    """[64, 4] from [64, 64]: the sums of what each of the four threads of a row holds."""
    return gl.sum(gl.sum(gl.reshape(e, [TILE, TILE // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax(s, m, sums, scale):
    """Online softmax of logits s [64, 64]: exponentials, running maximum [64], sums [64, 4] that are added up at the
    end, factor for what came before [64]."""
    m_new = running_maximum(m, gl.max(s, 1) * scale)
    e = gl.exp2(s * scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    row_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return e, m_new, sums * row_alpha[:, None] + _thread_sums(e), alpha


@gluon.jit
def _step(q, p, acc, m, sums, stage, phase, zeros, ring, codes_ptr, scale, MASKED: gl.constexpr):
    """One stage that has arrived: QK^T of its step beside PV of the step before, softmax under the latter."""
    k_smem, v_smem, full, empty = ring
    s_pending = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc_pending = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_pending,))
    if MASKED:
        s = gl.where(listed(codes_ptr, gl.SliceLayout(0, s.type.layout))[None, :], s, float("-inf"))
    e, m, sums, alpha = _softmax(s, m, sums, scale)
    p_next = gl.convert_layout(e.to(p.dtype), p.type.layout)
    # Waiting for the next stage here, and naming what the softmax made below, keeps the assembler from moving the wait
    # for PV in front of the exponentials: it does not see that they are meant to overlap.
    following, following_phase = next_stage(stage, phase, k_smem.type.shape[0])
    mbarrier.wait(full.index(following), following_phase)
    if MASKED:
        clear_unlisted(v_smem.index(following), codes_ptr)
    acc, p, p_next, sums = warpgroup_mma_wait(0, deps=(acc_pending, p, p_next, sums))
    mbarrier.arrive(empty.index(stage), count=1)
    return p_next, rescale(acc, alpha), m, sums, following, following_phase


@gluon.jit
def attend_wide(q_smem, ring, codes_ptr, masked, steps, scale, result):
    """One list, whose queries have arrived, from its first step to its stored rows.

    `result`: where the tile's first row goes, strides of rows and channels, and how many rows there are.
    """
    k_smem, v_smem, full, empty = ring
    STAGES: gl.constexpr = k_smem.type.shape[0]
    dtype: gl.constexpr = k_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    zeros = gl.zeros([TILE, TILE], gl.float32, S_LAYOUT)
    q = q_smem.load(gl.DotOperandLayout(0, S_LAYOUT, 2))  # [64, 128]

    # step 0: no PV to run beside
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))  # [64, 64]
    mbarrier.arrive(empty.index(0), count=1)
    s = gl.where(listed(codes_ptr, gl.SliceLayout(0, S_LAYOUT), masked > 0)[None, :], s, float("-inf"))
    m = gl.full([TILE], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    e, m, sums, _ = _softmax(s, m, gl.zeros_like(_thread_sums(s)), scale)
    p = gl.convert_layout(e.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))  # [64, 64]
    acc = gl.zeros([TILE, HEAD_DIM], gl.float32, O_LAYOUT)
    stage, phase = next_stage(0, 0, STAGES)
    mbarrier.wait(full.index(stage), phase)
    if masked > 0:
        clear_unlisted(v_smem.index(stage), codes_ptr)

    for step in range(1, masked):
        codes = codes_ptr + step * PER_STEP
        p, acc, m, sums, stage, phase = _step(q, p, acc, m, sums, stage, phase, zeros, ring, codes, scale, True)
    for _step_number in range(gl.maximum(masked, 1), steps):
        p, acc, m, sums, stage, phase = _step(q, p, acc, m, sums, stage, phase, zeros, ring, codes_ptr, scale, False)

    # PV of the last step, whose stage carries no K
    acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    l = gl.convert_layout(gl.sum(sums, 1), O_ROWS)
    acc = acc / gl.where(l == 0.0, 1.0, l)[:, None]
    # a short query tile is followed by another one's rows: they were computed, and are not stored
    out_ptr, stride_om, stride_od, size = result
    row = gl.arange(0, TILE, O_ROWS)
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O_LAYOUT))
    line_ptr = out_ptr + row.to(gl.int64) * stride_om
    gl.store(line_ptr[:, None] + (column * stride_od)[None, :], acc.to(dtype), mask=(row < size)[:, None])
