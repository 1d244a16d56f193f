"""The device code of linear_swiglu for Hopper, in Gluon: explicit copies, barriers and matrix instructions.

A program stays and takes output tiles [128, 128] in turn. One warp keeps a ring of stages filled, each 64 channels of
128 tokens, 128 rows of the value's weight and the same 128 of the gate's. Two groups of four warps multiply 64 tokens
each with all 256 rows of weights, so that a thread ends with the value and the gate of the same outputs, and neither
is ever written to memory. The second group starts some stages later: while one is at its exponentials, the other
multiplies.
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

GROUP_TOKENS = gl.constexpr(64)
"""Of a group of four warps: rows of one matrix instruction."""
GROUPS = gl.constexpr(2)
TOKENS = gl.constexpr(128)
OUTPUTS = gl.constexpr(128)
CHANNELS = gl.constexpr(64)
"""Of a stage: 128 bytes, one swizzle atom."""

RENAMED = gl.constexpr(hasattr(tma, "async_load"))
"""Gluon after Triton 3.6 has other names for some functions that are used here."""

async_load = tma.async_load if RENAMED.value else tma.async_copy_global_to_shared
async_store = tma.async_store if RENAMED.value else tma.async_copy_shared_to_global


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The following stage of a ring and the phase in which it is used."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _last(stage, STAGES: gl.constexpr):
    """The stage before. Not a variable that follows `stage`: Triton 3.6 takes two names of one value for one variable
    of a loop."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _corner(tile, blocks_S, blocks_F, BAND: gl.constexpr):
    """First token and first output of a tile. Bands of BAND blocks of tokens, in each of which outputs are slowest: the
    programs that run at once share few rows of both sides."""
    band = tile // (BAND * blocks_F)
    height = gl.minimum(BAND, blocks_S - band * BAND)
    inside = tile - band * BAND * blocks_F
    return (band * BAND + inside % height) * TOKENS, inside // height * OUTPUTS


@gluon.jit
def _copy_warp(x_boxes, w_boxes, x_smem, w_smem, full, empty, S, F, C, BAND: gl.constexpr):
    STAGES: gl.constexpr = w_smem.type.shape[0]
    BYTES: gl.constexpr = GROUPS * x_boxes.block_type.nbytes + 2 * w_boxes.block_type.nbytes
    blocks_S = gl.cdiv(S, TOKENS)
    blocks_F = gl.cdiv(F, OUTPUTS)
    stage = 0
    phase = 1  # a fresh barrier lets the opposite phase pass: every stage begins empty
    for tile in range(gl.program_id(0), blocks_S * blocks_F, gl.num_programs(0)):
        token, output = _corner(tile, blocks_S, blocks_F, BAND)
        for channel in range(0, C, CHANNELS):
            mbarrier.wait(empty.index(stage), phase)
            barrier = full.index(stage)
            mbarrier.expect(barrier, BYTES)
            for group in gl.static_range(GROUPS):
                target = x_smem.index(stage * GROUPS + group)
                async_load(x_boxes, [token + group * GROUP_TOKENS, channel], barrier, target)
            both = w_smem.index(stage)
            if RENAMED:
                halves = both.reinterpret(both.dtype, [2, OUTPUTS, CHANNELS], w_boxes.layout)
            else:
                halves = both._reinterpret(both.dtype, [2, OUTPUTS, CHANNELS], w_boxes.layout)
            async_load(w_boxes, [output, channel], barrier, halves.index(0))
            async_load(w_boxes, [F + output, channel], barrier, halves.index(1))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, LAG: gl.constexpr, BAND: gl.constexpr,
    out_boxes, bias_ptr, x_smem, w_smem, out_smem, full, empty, S, F, C,
):  # fmt: skip
    STAGES: gl.constexpr = w_smem.type.shape[0]
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTPUTS, 16])
    blocks_S = gl.cdiv(S, TOKENS)
    blocks_F = gl.cdiv(F, OUTPUTS)
    target = out_smem.index(GROUP)
    stage = 0
    phase = 0
    if gl.program_id(0) < blocks_S * blocks_F and C > LAG * CHANNELS:  # else that stage is never filled
        mbarrier.wait(full.index(LAG), 0)
    for tile in range(gl.program_id(0), blocks_S * blocks_F, gl.num_programs(0)):
        token, output = _corner(tile, blocks_S, blocks_F, BAND)
        acc = gl.zeros([GROUP_TOKENS, 2 * OUTPUTS], gl.float32, BOTH)
        for channel in range(0, C, CHANNELS):
            mbarrier.wait(full.index(stage), phase)
            x = x_smem.index(stage * GROUPS + GROUP)
            acc = warpgroup_mma(x, w_smem.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(_last(stage, STAGES)), count=1, pred=channel > 0)  # its products are over
            stage, phase = _next(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(_last(stage, STAGES)), count=1)

        value, gate = acc.reshape([GROUP_TOKENS, 2, OUTPUTS]).permute([0, 2, 1]).split()
        at = output + gl.arange(0, OUTPUTS, gl.SliceLayout(0, value.type.layout))
        value += gl.load(bias_ptr + at, mask=at < F, other=0.0).to(gl.float32)[None, :]
        gate += gl.load(bias_ptr + F + at, mask=at < F, other=0.0).to(gl.float32)[None, :]
        out = gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * value
        tma.store_wait(0)
        target.store(out.to(out_smem.dtype))
        fence_async_shared()
        async_store(out_boxes, [token + GROUP * GROUP_TOKENS, output], target)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["S"])
def linear_swiglu_kernel(
    x_boxes, w_boxes, out_boxes, bias_ptr, S, F, C,
    STAGES: gl.constexpr, BAND: gl.constexpr, LAG: gl.constexpr, COPY_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [S, F] = silu(x @ w[F:].T + b[F:]) * (x @ w[:F].T + b[:F]) of x [S, C] and w [2F, C]."""
    dtype: gl.constexpr = x_boxes.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, GROUP_TOKENS, CHANNELS], x_boxes.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, 2 * OUTPUTS, CHANNELS], w_boxes.layout)
    out_smem = gl.allocate_shared_memory(dtype, [GROUPS, GROUP_TOKENS, OUTPUTS], out_boxes.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    gl.warp_specialize(
        [
            (_multiply, (0, 0, BAND, out_boxes, bias_ptr, x_smem, w_smem, out_smem, full, empty, S, F, C)),
            (_multiply, (1, LAG, BAND, out_boxes, bias_ptr, x_smem, w_smem, out_smem, full, empty, S, F, C)),
            (_copy_warp, (x_boxes, w_boxes, x_smem, w_smem, full, empty, S, F, C, BAND)),
        ],
        [4, 1], [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
