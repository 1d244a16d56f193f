"""The device code of the Hopper path, in Gluon: explicit copies, barriers and matrix instructions.

A program takes one query tile of one head; two programs share a multiprocessor. One warp walks the packed list and
keeps a ring of stages filled (hopper_copy.py, hopper_ring.py); four warps compute QK^T, softmax and PV, 64 queries at a
time (hopper_wide.py), or 32 or 16 where the tile has no more (hopper_narrow.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_copy import copy_list
from .hopper_narrow import attend_narrow
from .hopper_ring import HEAD_DIM, PER_STEP, TILE
from .hopper_wide import attend_wide


@gluon.jit
def _multiply_warps(
    q_smem, q_full, k_smem, v_smem, full, empty, out_ptr, stride_om, stride_od, codes_ptr, steps_ptr, size, scale
):
    masked = gl.load(steps_ptr)
    steps = gl.load(steps_ptr + 2)
    ring = (k_smem, v_smem, full, empty)
    result = (out_ptr, stride_om, stride_od, size)
    mbarrier.wait(q_full, 0)
    if size > 32:
        attend_wide(q_smem, ring, codes_ptr, masked, steps, scale, result)
    elif size > 16:
        attend_narrow(q_smem, ring, codes_ptr, masked, steps, scale, result, 32)
    else:
        attend_narrow(q_smem, ring, codes_ptr, masked, steps, scale, result, 16)


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
