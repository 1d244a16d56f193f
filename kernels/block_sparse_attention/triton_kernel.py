"""Triton block_sparse_attention, forward. One program a head and query tile: 64 queries against the steps of its list.

Full key tiles take no mask and no gather. A second loop takes what is left, packed from the granules of ragged tiles
(steps.py): rows that no granule fills are not read at all, so a neighbour's NaN cannot reach a result.
Full tiles come by tensor descriptor where the GPU copies by descriptor, else by pointer; granules come by pointer. Both
use the caller's strides. Figures: bench/README.md.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import check_last_dim
from .steps import GRANULE, KIND_MASK, ROW_SHIFT, STEP, pack_lists

_LOG2_E = 1.4426950408889634

_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The running maximum before the first key. Not -inf: a list without keys then has exponentials of 0 and no NaN."""


@dataclass(frozen=True)
class Launch:
    """How the kernel is compiled for one generation of GPUs."""

    descriptors: bool
    """Full tiles by tensor descriptor."""
    stages: int
    """Software pipeline of full tiles; two programs should fit into a multiprocessor's shared memory."""
    granule_stages: int
    """Of packed steps."""
    warps: int = 4


_LAUNCHES = {
    # measured on an H200: 5 stages hold three tiles of keys and of values and leave room for a second program
    (9, 0): Launch(descriptors=True, stages=5, granule_stages=2),
    # not measured: what compiles without spills within the shared memory of the generation
    (12, 0): Launch(descriptors=True, stages=2, granule_stages=2),
    (10, 0): Launch(descriptors=True, stages=3, granule_stages=2),
    (8, 0): Launch(descriptors=False, stages=3, granule_stages=2),
    (7, 5): Launch(descriptors=False, stages=1, granule_stages=1, warps=8),
}


def launch_for(capability: tuple[int, int]) -> Launch:
    """The row of the newest generation that is not newer than `capability`."""
    return _LAUNCHES[max(row for row in _LAUNCHES if row <= capability)]


@triton.jit
def _softmax_step(logits, v, highest, total, acc, scale):
    """One step of the online softmax. `scale` has 1 / ln 2 in it: exponentials are of base 2."""
    higher = tl.maximum(highest, tl.max(logits, axis=1) * scale)
    weight = tl.exp2(logits * scale - higher[:, None])
    rescale = tl.exp2(highest - higher)
    total = total * rescale + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None])
    return higher, total, acc


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, k_tiles, v_tiles, out_ptr, offsets_ptr, granules_ptr, full_ptr, steps_ptr,
    stride_qs, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, stride_os, stride_oh,
    V, P, K, scale,
    D: tl.constexpr, DESCRIPTORS: tl.constexpr, STAGES: tl.constexpr, GRANULE_STAGES: tl.constexpr,
):
    """k_tiles, v_tiles: descriptors of [64, D] blocks over all heads, or anything where DESCRIPTORS is off."""
    # int64 before any stride: a slice of [S, 3, 56, 128] passes 2**31 elements at 99,865 tokens
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    k_column = (head * stride_kh).to(tl.int32)
    v_column = (head * stride_vh).to(tl.int32)
    k_ptr += head * stride_kh
    v_ptr += head * stride_vh

    start = tl.load(offsets_ptr + P + tile)
    size = tl.load(offsets_ptr + P + tile + 1) - start
    first = (start - tl.load(offsets_ptr + P)).to(tl.int64)
    slot = tl.arange(0, STEP)
    row = slot[:, None]
    col = tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + first * stride_qs + head * stride_qh + row * stride_qs + col, mask=row < size, other=0.0)

    highest = tl.full([STEP], _LOWEST, tl.float32)
    total = tl.zeros([STEP], tl.float32)
    acc = tl.zeros([STEP, D], tl.float32)
    listed = head * V + tile
    full_ptr += listed * K
    granules_ptr += listed * K * (STEP // GRANULE)
    ragged = tl.load(steps_ptr + 3 * listed + 1)

    for j in tl.range(0, tl.load(steps_ptr + 3 * listed + 2) - ragged, num_stages=STAGES):
        token = tl.load(full_ptr + j)
        if DESCRIPTORS:
            k = k_tiles.load([token, k_column])
            v = v_tiles.load([token, v_column])
        else:
            k = tl.load(k_ptr + token.to(tl.int64) * stride_ks + (row * stride_ks + col))
            v = tl.load(v_ptr + token.to(tl.int64) * stride_vs + (row * stride_vs + col))
        logits = tl.dot(q, tl.trans(k))
        highest, total, acc = _softmax_step(logits, v, highest, total, acc, scale)

    for j in tl.range(0, ragged, num_stages=GRANULE_STAGES):
        code = tl.load(granules_ptr + (j * STEP + slot) // GRANULE)
        within = slot % GRANULE
        inside = within < (code & KIND_MASK)
        tokens = ((code >> ROW_SHIFT) + within).to(tl.int64)[:, None]
        k = tl.load(k_ptr + tokens * stride_ks + col, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + tokens * stride_vs + col, mask=inside[:, None], other=0.0)
        logits = tl.where(inside[None, :], tl.dot(q, tl.trans(k)), -float("inf"))
        highest, total, acc = _softmax_step(logits, v, highest, total, acc, scale)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # an empty list leaves zeros
    out_ptr += first * stride_os + head * stride_oh
    tl.store(out_ptr + row * stride_os + col, acc.to(out_ptr.dtype.element_ty), mask=row < size)


def block_sparse_attention_triton(q, k, v, offsets, index, count, *, out=None, byte_budget=None):
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (7, 5)
    return attend(q, k, v, offsets, index, count, out, launch_for(capability))


def attend(q, k, v, offsets, index, count, out, launch: Launch):
    """The op under a given launch. Tiles have at most 64 tokens."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check_last_dim("block_sparse_attention", q=q, k=k, v=v, out=out)
    S, H, D = k.shape
    V, K = index.shape[1:]
    lists = pack_lists(offsets, index, count, S)
    descriptors = launch.descriptors and _describable(k) and _describable(v)
    tiles = [_describe(k), _describe(v)] if descriptors else [k, v]
    with torch.cuda.device_of(q):
        _attend_kernel[(V, H)](
            q, k, v, *tiles, out, offsets, lists.granules, lists.full, lists.steps,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
            V, offsets.numel() - 1 - V, K, D**-0.5 * _LOG2_E,
            D=D, DESCRIPTORS=descriptors, STAGES=launch.stages, GRANULE_STAGES=launch.granule_stages,
            num_warps=launch.warps,
        )
    return out


def _describable(x: torch.Tensor) -> bool:
    """Whether a token's heads lie within one row of a matrix that the copy engine can address (16-byte steps)."""
    row, head = x.stride()[:2]
    aligned = x.data_ptr() % 16 == 0 and row * x.element_size() % 16 == 0
    return aligned and (x.shape[1] - 1) * head + x.shape[2] <= row


def _describe(x: torch.Tensor) -> TensorDescriptor:
    S, H, D = x.shape
    return TensorDescriptor(x, [S, (H - 1) * x.stride(1) + D], [x.stride(0), 1], [STEP.value, D])
