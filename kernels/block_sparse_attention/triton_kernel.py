"""Triton block_sparse_attention, forward. One program a head and query tile: 64 queries against the steps of its list.

Full key tiles take no mask; a second loop takes what is left 32 keys at a time with one (steps.py). A row past a tile's
end belongs to another tile: as a key it is masked, as a value it is zeroed, as a query it is not stored.
Keys and values come by tensor descriptor where the GPU copies by descriptor, else by pointer, both from the caller's
strides. Figures: bench/README.md.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import check_last_dim
from .steps import PIECE, STEP, steps_of

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """How the kernel is compiled for one generation of GPUs."""

    descriptors: bool
    """Keys and values by tensor descriptor."""
    stages: int
    """Software pipeline of full tiles; what fits twice into a multiprocessor's shared memory."""
    piece_stages: int
    """Of the masked pieces."""
    warps: int = 4


_LAUNCHES = {
    # measured on an H200: 5 stages hold three tiles and leave room for two programs; 8 warps are half as fast
    (9, 0): Launch(descriptors=True, stages=5, piece_stages=3),
    # not measured: what compiles within the shared memory of the generation, one tile ahead
    (12, 0): Launch(descriptors=True, stages=2, piece_stages=2),
    (10, 0): Launch(descriptors=True, stages=3, piece_stages=2),
    (8, 0): Launch(descriptors=False, stages=2, piece_stages=2),
    (7, 5): Launch(descriptors=False, stages=1, piece_stages=1),
}


def launch_for(capability: tuple[int, int]) -> Launch:
    """The row of the newest generation that is not newer than `capability`."""
    return _LAUNCHES[max(row for row in _LAUNCHES if row <= capability)]


@triton.jit
def _load_tile(source, start, column, stride, ROWS: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """[ROWS, D] from token `start`. `source` is a descriptor, or a pointer to the head's first channel."""
    if DESCRIPTORS:
        return source.load([start, column])
    else:
        offset = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, D)[None, :]
        return tl.load(source + start.to(tl.int64) * stride + offset)


@triton.jit
def _load_piece(
    source, start, size, column, stride, ROWS: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """[ROWS, D] from token `start`. From `size` on it is zero by pointer, and another tile by descriptor."""
    if DESCRIPTORS:
        return source.load([start, column])
    else:
        row = tl.arange(0, ROWS)[:, None]
        offset = row * stride + tl.arange(0, D)[None, :]
        return tl.load(source + start.to(tl.int64) * stride + offset, mask=row < size, other=0.0)


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
    q_ptr, k, v, k_piece, v_piece, out_ptr, offsets_ptr, steps_ptr, lengths_ptr,
    stride_qs, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, stride_os, stride_oh,
    V, P, W, scale,
    D: tl.constexpr, STEP: tl.constexpr, PIECE: tl.constexpr, DESCRIPTORS: tl.constexpr,
    STAGES: tl.constexpr, PIECE_STAGES: tl.constexpr,
):
    """k, v, k_piece, v_piece: descriptors of STEP and PIECE rows, or pointers."""
    # int64 before any stride: a slice of [S, 3, 56, 128] passes 2**31 elements at 99,865 tokens
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    k_column = (head * stride_kh).to(tl.int32)
    v_column = (head * stride_vh).to(tl.int32)
    if not DESCRIPTORS:
        k += head * stride_kh
        v += head * stride_vh
        k_piece += head * stride_kh
        v_piece += head * stride_vh

    start = tl.load(offsets_ptr + P + tile)
    size = tl.load(offsets_ptr + P + tile + 1) - start
    first = (start - tl.load(offsets_ptr + P)).to(tl.int64)
    row = tl.arange(0, STEP)[:, None]
    col = tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + first * stride_qs + head * stride_qh + row * stride_qs + col, mask=row < size, other=0.0)

    highest = tl.full([STEP], -float("inf"), tl.float32)
    total = tl.zeros([STEP], tl.float32)
    acc = tl.zeros([STEP, D], tl.float32)
    listed = head * V + tile
    front_ptr = steps_ptr + listed * W
    back_ptr = front_ptr + (W - 1)
    num_full = tl.load(lengths_ptr + 2 * listed)
    num_pieces = tl.load(lengths_ptr + 2 * listed + 1)

    for j in tl.range(0, num_full, num_stages=STAGES):
        key = tl.load(front_ptr + j)
        k_tile = _load_tile(k, key, k_column, stride_ks, STEP, D, DESCRIPTORS)
        v_tile = _load_tile(v, key, v_column, stride_vs, STEP, D, DESCRIPTORS)
        logits = tl.dot(q, tl.trans(k_tile))
        highest, total, acc = _softmax_step(logits, v_tile, highest, total, acc, scale)

    for j in tl.range(0, num_pieces, num_stages=PIECE_STAGES):
        piece = tl.load(back_ptr - j)
        key = piece // STEP
        length = piece % STEP
        k_tile = _load_piece(k_piece, key, length, k_column, stride_ks, PIECE, D, DESCRIPTORS)
        v_tile = _load_piece(v_piece, key, length, v_column, stride_vs, PIECE, D, DESCRIPTORS)
        if DESCRIPTORS:
            v_tile = tl.where((tl.arange(0, PIECE) < length)[:, None], v_tile, 0.0)
        logits = tl.dot(q, tl.trans(k_tile))
        logits = tl.where((tl.arange(0, PIECE) < length)[None, :], logits, -float("inf"))
        highest, total, acc = _softmax_step(logits, v_tile, highest, total, acc, scale)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # an empty list leaves zeros
    out_ptr += first * stride_os + head * stride_oh
    tl.store(out_ptr + row * stride_os + col, acc.to(out_ptr.dtype.element_ty), mask=row < size)


def block_sparse_attention_triton(q, k, v, offsets, index, count, *, out=None, byte_budget=None):
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (7, 5)
    return attend(q, k, v, offsets, index, count, out, launch_for(capability))


def attend(q, k, v, offsets, index, count, out, launch):
    """The op under a given launch. Tiles have at most 64 tokens."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check_last_dim("block_sparse_attention", q=q, k=k, v=v, out=out)
    S, H, D = k.shape
    V, K = index.shape[1:]
    steps, lengths = steps_of(offsets, index, count, S)
    descriptors = launch.descriptors and _describable(k) and _describable(v)
    sources = [k, v, k, v]
    if descriptors:
        sources = [_describe(x, rows) for rows in (STEP, PIECE) for x in (k, v)]
    with torch.cuda.device_of(q):
        _attend_kernel[(V, H)](
            q, *sources, out, offsets, steps, lengths,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
            V, offsets.numel() - 1 - V, 2 * K, D**-0.5 * _LOG2_E,
            D=D, STEP=STEP, PIECE=PIECE, DESCRIPTORS=descriptors,
            STAGES=launch.stages, PIECE_STAGES=launch.piece_stages,
            num_warps=launch.warps,
        )
    return out


def _describable(x: torch.Tensor) -> bool:
    """Whether a token's heads lie within one row of a matrix that the copy engine can address (16-byte steps)."""
    row, head = x.stride()[:2]
    aligned = x.data_ptr() % 16 == 0 and row * x.element_size() % 16 == 0
    return aligned and (x.shape[1] - 1) * head + x.shape[2] <= row


def _describe(x: torch.Tensor, rows: int) -> TensorDescriptor:
    S, H, D = x.shape
    return TensorDescriptor(x, [S, (H - 1) * x.stride(1) + D], [x.stride(0), 1], [rows, D])
