"""The device code of the Hopper path, in Gluon: explicit copies, barriers and matrix instructions.

A program takes a few query tiles in turn; two programs share a multiprocessor. One warp walks the packed lists
(steps.py) and keeps a ring of stages filled; four warps compute QK^T, softmax and PV. Stage j carries K of step j
and V of step j - 1, because the two products that run together are those: while the tensor cores multiply P of step
j - 1 with V, the softmax of step j is computed. A list of T steps takes T + 1 stages.

Keys of a full tile are one 64-row copy; pieces of ragged tiles are 8- to 32-row copies into the eighths of a stage. A
short granule brings rows of its neighbour along, which may be NaN and are not of the list: their logits are replaced,
and their values are set to zero in shared memory, because zero times NaN is NaN. An empty granule lies behind the last
token, where the copy engine writes zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import steps

TILE = gl.constexpr(steps.STEP.value)
HEAD_DIM = gl.constexpr(128)
ATOM = gl.constexpr(64)
"""Columns of a swizzle atom: 128 bytes of a 16-bit type. The second half of all 64 rows follows the first in memory."""

GRANULE = gl.constexpr(steps.GRANULE.value)
PER_STEP = gl.constexpr(steps.STEP.value // steps.GRANULE.value)
ROW_SHIFT = gl.constexpr(steps.ROW_SHIFT.value)
KIND_MASK = gl.constexpr(steps.KIND_MASK.value)
PAIR = gl.constexpr(steps.PAIR.value)
FOUR = gl.constexpr(steps.FOUR.value)

LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The running maximum before the first key. Not -inf: a list without keys then has exponentials of 0 and no NaN."""

RENAMED = gl.constexpr(hasattr(tma, "async_load"))
"""Gluon after Triton 3.6 has other names for two functions that are used here."""

async_load = tma.async_load if RENAMED.value else tma.async_copy_global_to_shared


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The following stage of a ring and the phase in which it is used."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


# ---- the copying warp


@gluon.jit
def _copy_piece(boxes, row, column, dst, granule, barrier):
    """Start the copy of adjacent rows into a stage [64, 128], from one of its granules on."""
    ROWS: gl.constexpr = boxes.block_type.shape[0]
    if RENAMED:
        parts = dst.reinterpret(dst.dtype, [2 * TILE // ROWS, ROWS, ATOM], boxes.layout)
    else:
        parts = dst._reinterpret(dst.dtype, [2 * TILE // ROWS, ROWS, ATOM], boxes.layout)
    part = granule * GRANULE // ROWS
    async_load(boxes, [row, column], barrier, parts.index(part))
    async_load(boxes, [row, column + ATOM], barrier, parts.index(TILE // ROWS + part))


@gluon.jit
def _copy_step(step, ragged, full_row, boxes, column, dst, barrier, codes_ptr):
    """Start the copies of one step's 64 keys or values into dst [64, 128]."""
    tiles, fours, pairs, ones = boxes
    if step >= ragged:
        async_load(tiles, [full_row, column], barrier, dst)
    else:
        codes_ptr += step * PER_STEP
        for half in gl.static_range(0, PER_STEP, 4):
            code = gl.load(codes_ptr + half)
            if code & KIND_MASK == FOUR:
                _copy_piece(fours, code >> ROW_SHIFT, column, dst, half, barrier)
            else:
                for g in gl.static_range(half, half + 4, 2):
                    code = gl.load(codes_ptr + g)
                    second = gl.load(codes_ptr + g + 1)
                    if code & KIND_MASK == PAIR:
                        _copy_piece(pairs, code >> ROW_SHIFT, column, dst, g, barrier)
                    else:
                        _copy_piece(ones, code >> ROW_SHIFT, column, dst, g, barrier)
                        _copy_piece(ones, second >> ROW_SHIFT, column, dst, g + 1, barrier)


@gluon.jit
def _copy_warp(
    q_tiles, k_tiles, k_fours, k_pairs, k_ones, v_tiles, v_fours, v_pairs, v_ones, q_head, k_head, v_head,
    q_smem, q_full, q_empty, k_smem, v_smem, full, empty,
    q_offsets_ptr, codes_ptr, rows_ptr, steps_ptr, first_list, end_list, V, K,
):  # fmt: skip
    STAGES: gl.constexpr = k_smem.type.shape[0]
    BYTES: gl.constexpr = k_tiles.block_type.nbytes
    k_boxes = (k_tiles, k_fours, k_pairs, k_ones)
    v_boxes = (v_tiles, v_fours, v_pairs, v_ones)
    first_row = gl.load(q_offsets_ptr)
    stage = 0
    phase = 1  # a fresh barrier lets the opposite phase pass: every stage begins empty
    q_phase = 1
    for item in range(first_list, end_list):
        head = item // V
        ragged = gl.load(steps_ptr + item * 3 + 1)
        steps = gl.load(steps_ptr + item * 3 + 2)
        codes = codes_ptr + item.to(gl.int64) * K * PER_STEP
        rows = rows_ptr + item.to(gl.int64) * K
        k_column = head * k_head
        v_column = head * v_head

        q_row = gl.load(q_offsets_ptr + item - head * V) - first_row
        mbarrier.wait(q_empty, q_phase)
        mbarrier.expect(q_full, BYTES)
        async_load(q_tiles, [q_row, head * q_head], q_full, q_smem)
        q_phase = q_phase ^ 1

        row = gl.load(rows, mask=ragged == 0, other=0)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), BYTES)
        _copy_step(0, ragged, row, k_boxes, k_column, k_smem.index(stage), full.index(stage), codes)
        for step in range(1, steps):
            last_row = row
            row = gl.load(rows + step - ragged, mask=step >= ragged, other=0)  # arrives during the wait
            stage, phase = _next(stage, phase, STAGES)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * BYTES)
            _copy_step(step, ragged, row, k_boxes, k_column, k_smem.index(stage), full.index(stage), codes)
            _copy_step(step - 1, ragged, last_row, v_boxes, v_column, v_smem.index(stage), full.index(stage), codes)
        stage, phase = _next(stage, phase, STAGES)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), BYTES)
        _copy_step(steps - 1, ragged, row, v_boxes, v_column, v_smem.index(stage), full.index(stage), codes)
        stage, phase = _next(stage, phase, STAGES)


# ---- the multiplying warps


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
    next_stage, next_phase = _next(stage, phase, k_smem.type.shape[0])
    mbarrier.wait(full.index(next_stage), next_phase)
    if MASKED:
        _clear_unlisted(v_smem.index(next_stage), codes_ptr)
    acc, p, p_next, l = warpgroup_mma_wait(0, deps=(acc_pending, p, p_next, l))
    mbarrier.arrive(empty.index(stage), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    return p_next, acc, m, l, next_stage, next_phase


@gluon.jit
def _multiply_warps(
    q_smem, q_full, q_empty, k_smem, v_smem, full, empty,
    out_ptr, stride_om, stride_oh, stride_od, q_offsets_ptr, codes_ptr, steps_ptr, first_list, end_list, V, K, scale,
):  # fmt: skip
    STAGES: gl.constexpr = k_smem.type.shape[0]
    dtype: gl.constexpr = k_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    zeros = gl.zeros([TILE, TILE], gl.float32, S_LAYOUT)
    first_row = gl.load(q_offsets_ptr)
    stage = 0
    phase = 0
    q_phase = 0
    for item in range(first_list, end_list):
        head = item // V
        codes = codes_ptr + item.to(gl.int64) * K * PER_STEP
        masked = gl.load(steps_ptr + item * 3)
        steps = gl.load(steps_ptr + item * 3 + 2)

        # Q stays in registers, so the next one may be fetched at once
        mbarrier.wait(q_full, q_phase)
        q = q_smem.load(gl.DotOperandLayout(0, S_LAYOUT, 2))  # [64, 128]
        mbarrier.arrive(q_empty, count=1)
        q_phase = q_phase ^ 1

        # step 0: no PV to run beside
        mbarrier.wait(full.index(stage), phase)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))  # [64, 64]
        mbarrier.arrive(empty.index(stage), count=1)
        s = gl.where(_listed(codes, gl.SliceLayout(0, S_LAYOUT), masked > 0)[None, :], s, float("-inf"))
        m = gl.full([TILE], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        e, m, l, _ = _softmax(s, m, gl.zeros_like(m), scale)
        p = gl.convert_layout(e.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))  # [64, 64]
        acc = gl.zeros([TILE, HEAD_DIM], gl.float32, O_LAYOUT)
        stage, phase = _next(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase)
        if masked > 0:
            _clear_unlisted(v_smem.index(stage), codes)

        for step in range(1, masked):
            p, acc, m, l, stage, phase = _step(
                q, p, acc, m, l, stage, phase, zeros, k_smem, v_smem, full, empty, codes + step * PER_STEP, scale, True
            )
        for _step_number in range(gl.maximum(masked, 1), steps):
            p, acc, m, l, stage, phase = _step(
                q, p, acc, m, l, stage, phase, zeros, k_smem, v_smem, full, empty, codes, scale, False
            )

        # PV of the last step, whose stage carries no K
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase, STAGES)

        l = gl.convert_layout(l, O_ROWS, assert_trivial=True)
        acc = acc / gl.where(l == 0.0, 1.0, l)[:, None]
        # a short query tile is followed by another one's rows: they were computed, and are not stored
        start = gl.load(q_offsets_ptr + item - head * V)
        size = gl.load(q_offsets_ptr + item - head * V + 1) - start
        row = gl.arange(0, TILE, O_ROWS)
        column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O_LAYOUT))
        line_ptr = out_ptr + (start - first_row + row).to(gl.int64) * stride_om + head.to(gl.int64) * stride_oh
        gl.store(line_ptr[:, None] + (column * stride_od)[None, :], acc.to(dtype), mask=(row < size)[:, None])


@gluon.jit(do_not_specialize=["num_lists", "chunk", "V", "K", "num_prefix"])
def attention_kernel(
    q_tiles, k_tiles, k_fours, k_pairs, k_ones, v_tiles, v_fours, v_pairs, v_ones, q_head, k_head, v_head,
    out_ptr, stride_om, stride_oh, stride_od, offsets_ptr, codes_ptr, rows_ptr, steps_ptr,
    num_lists, chunk, V, K, num_prefix, scale, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program n takes lists n chunk to (n + 1) chunk. `*_head`: columns from one head to the next."""
    dtype: gl.constexpr = k_tiles.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [TILE, HEAD_DIM], q_tiles.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)

    first_list = gl.program_id(0) * chunk
    end_list = gl.minimum(first_list + chunk, num_lists)
    q_offsets_ptr = offsets_ptr + num_prefix  # of the video tokens, which is what q has
    gl.warp_specialize(
        [
            (_multiply_warps, (
                q_smem, q_full, q_empty, k_smem, v_smem, full, empty,
                out_ptr, stride_om, stride_oh, stride_od,
                q_offsets_ptr, codes_ptr, steps_ptr, first_list, end_list, V, K, scale,
            )),
            (_copy_warp, (
                q_tiles, k_tiles, k_fours, k_pairs, k_ones, v_tiles, v_fours, v_pairs, v_ones, q_head, k_head, v_head,
                q_smem, q_full, q_empty, k_smem, v_smem, full, empty,
                q_offsets_ptr, codes_ptr, rows_ptr, steps_ptr, first_list, end_list, V, K,
            )),
        ],
        [1], [COPY_REGISTERS],
    )  # fmt: skip
