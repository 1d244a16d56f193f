"""The copying warp of the Hopper path: brings a list's queries, then its keys and values through the ring of stages.

Keys of a full tile are one 64-row copy; pieces of ragged tiles are 8- to 32-row copies into the eighths of a stage. A
short granule brings rows of its neighbour along. An empty one lies behind the last token, where the copy engine writes
zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import steps
from .hopper_ring import ATOM, GRANULE, KIND_MASK, PER_STEP, RENAMED, TILE, next_stage, view

ROW_SHIFT = gl.constexpr(steps.ROW_SHIFT.value)
PAIR = gl.constexpr(steps.PAIR.value)
FOUR = gl.constexpr(steps.FOUR.value)

async_load = tma.async_load if RENAMED.value else tma.async_copy_global_to_shared


@gluon.jit
def _copy_piece(boxes, row, column, dst, granule, barrier):
    """Start the copy of adjacent rows into a stage [64, 128], from one of its granules on."""
    ROWS: gl.constexpr = boxes.block_type.shape[0]
    LAYOUT: gl.constexpr = boxes.layout
    parts = view(dst, [2 * TILE // ROWS, ROWS, ATOM], LAYOUT)
    part = granule * GRANULE // ROWS
    async_load(boxes, [row, column], barrier, parts.index(part))
    async_load(boxes, [row, column + ATOM], barrier, parts.index(TILE // ROWS + part))


@gluon.jit
def _codes_of(codes_ptr, step, ragged):
    """The eight codes of a ragged step, all on their way at once."""
    codes_ptr += step * PER_STEP
    codes = ()
    for g in gl.static_range(PER_STEP):
        codes += (gl.load(codes_ptr + g, mask=step < ragged, other=0),)
    return codes


@gluon.jit
def _copy_step(step, ragged, full_row, codes, boxes, column, dst, barrier):
    """Start the copies of one step's 64 keys or values into dst [64, 128]."""
    tiles, fours, pairs, ones = boxes
    if step >= ragged:
        async_load(tiles, [full_row, column], barrier, dst)
    else:
        for half in gl.static_range(0, PER_STEP, 4):
            if codes[half] & KIND_MASK == FOUR:
                _copy_piece(fours, codes[half] >> ROW_SHIFT, column, dst, half, barrier)
            else:
                for g in gl.static_range(half, half + 4, 2):
                    if codes[g] & KIND_MASK == PAIR:
                        _copy_piece(pairs, codes[g] >> ROW_SHIFT, column, dst, g, barrier)
                    else:
                        _copy_piece(ones, codes[g] >> ROW_SHIFT, column, dst, g, barrier)
                        _copy_piece(ones, codes[g + 1] >> ROW_SHIFT, column, dst, g + 1, barrier)


@gluon.jit
def copy_list(
    q_tiles, k_tiles, k_fours, k_pairs, k_ones, v_tiles, v_fours, v_pairs, v_ones, q_head, k_head, v_head,
    q_smem, q_full, k_smem, v_smem, full, empty, codes_ptr, rows_ptr, steps_ptr, head, q_row,
):  # fmt: skip
    """Bring one list, whose query tile begins at q_row, to who waits for `full`, and refill what is `empty`."""
    STAGES: gl.constexpr = k_smem.type.shape[0]
    BYTES: gl.constexpr = k_tiles.block_type.nbytes
    k_boxes = (k_tiles, k_fours, k_pairs, k_ones)
    v_boxes = (v_tiles, v_fours, v_pairs, v_ones)
    k_column = head * k_head
    v_column = head * v_head
    ragged = gl.load(steps_ptr + 1)
    steps = gl.load(steps_ptr + 2)
    mbarrier.expect(q_full, BYTES)
    async_load(q_tiles, [q_row, head * q_head], q_full, q_smem)

    row = gl.load(rows_ptr, mask=ragged == 0, other=0)
    codes = _codes_of(codes_ptr, 0, ragged)
    mbarrier.expect(full.index(0), BYTES)
    _copy_step(0, ragged, row, codes, k_boxes, k_column, k_smem.index(0), full.index(0))
    stage = 0
    phase = 1  # a fresh barrier lets the opposite phase pass: every stage begins empty
    for step in range(1, steps):
        last_row, last_codes = row, codes
        row = gl.load(rows_ptr + step - ragged, mask=step >= ragged, other=0)  # arrives, as codes do, during the wait
        codes = _codes_of(codes_ptr, step, ragged)
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 2 * BYTES)
        _copy_step(step, ragged, row, codes, k_boxes, k_column, k_smem.index(stage), full.index(stage))
        _copy_step(step - 1, ragged, last_row, last_codes, v_boxes, v_column, v_smem.index(stage), full.index(stage))
    stage, phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), BYTES)
    _copy_step(steps - 1, ragged, row, codes, v_boxes, v_column, v_smem.index(stage), full.index(stage))
