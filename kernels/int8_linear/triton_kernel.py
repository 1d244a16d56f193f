"""int8 weights as floats some output rows at a time, for a product of torch's own: 1 to 2 % of what the product takes.

A program keeps one column block of the rotation in shared memory and walks down the output rows. Integers below 128
and the rotation's +-1/sqrt(group) are exact in fp16, and so are their sums in fp32: only the store rounds.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from ..device import check_last_dim
from .reference import dequantise_int8_reference, hadamard

BLOCK_O, BLOCK_I, ROW_BLOCKS = 64, 64, 8
"""Output rows and input features at once; blocks of rows that a program takes one after the other."""
NUM_WARPS = 4
_LEAST_GROUP = 16
"""Input features of a matrix instruction: smaller rotations stand along the diagonal of one of this size."""

_CHUNK_BYTES = 64 << 20
"""Of float weight at a time."""


@triton.jit
def _dequantise_int8_kernel(
    weight_ptr, scale_ptr, rotation_ptr, out_ptr,
    stride_weight,
    O, I,
    GROUP: tl.constexpr, ROW_BLOCKS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first_col = tl.program_id(0) * BLOCK_I
    cols = first_col + tl.arange(0, BLOCK_I)
    first_k = 0 if GROUP == 0 else first_col // GROUP * GROUP
    for block in range(ROW_BLOCKS):
        rows = (tl.program_id(1) * ROW_BLOCKS + block) * BLOCK_O + tl.arange(0, BLOCK_O)
        rows_ptr = weight_ptr + rows.to(tl.int64)[:, None] * stride_weight
        if GROUP == 0:
            inside = (rows < O)[:, None] & (cols < I)[None, :]
            weight = tl.load(rows_ptr + cols[None, :], mask=inside, other=0).to(tl.float32)  # [BLOCK_O, BLOCK_I]
        else:
            weight = tl.zeros([BLOCK_O, BLOCK_I], dtype=tl.float32)
            for k in tl.static_range(0, GROUP, BLOCK_K):
                turned = k + tl.arange(0, BLOCK_K)
                rotation = tl.load(rotation_ptr + turned[:, None] * GROUP + (cols % GROUP)[None, :])
                part = tl.load(rows_ptr + (first_k + turned)[None, :], mask=(rows < O)[:, None], other=0)
                weight = tl.dot(part.to(tl.float16), rotation, weight)
        scale = tl.load(scale_ptr + rows, mask=rows < O, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * I + cols[None, :]
        out = (weight * scale[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs, out, mask=(rows < O)[:, None] & (cols < I)[None, :])


@cache
def _rotation(group: int, device: torch.device) -> torch.Tensor:
    """fp16 [G, G]: the rotation of `group` features, repeated along the diagonal up to what one instruction takes."""
    copies = max(1, _LEAST_GROUP // group)
    return torch.block_diag(*[hadamard(group, device)] * copies).half()


def dequantise_int8_triton(weight, scale, group, dtype, out=None):
    """weight [O, I] int8 -> [O, I] in `dtype`, into `out` if given."""
    check_last_dim("int8_linear", weight=weight)
    O, I = weight.shape
    if out is None:
        out = torch.empty(O, I, dtype=dtype, device=weight.device)
    if group and I % max(group, _LEAST_GROUP):
        return out.copy_(dequantise_int8_reference(weight, scale, group))  # no released file has such a layer
    rotation = _rotation(group, weight.device) if group else weight
    size = rotation.shape[0] if group else 0
    block_i = min(BLOCK_I, size) if group else BLOCK_I
    with torch.cuda.device_of(weight):
        _dequantise_int8_kernel[(triton.cdiv(I, block_i), triton.cdiv(O, BLOCK_O * ROW_BLOCKS))](
            weight, scale.reshape(-1), rotation, out,
            weight.stride(0),
            O, I,
            GROUP=size, ROW_BLOCKS=ROW_BLOCKS, BLOCK_O=BLOCK_O, BLOCK_I=block_i, BLOCK_K=block_i,
            num_warps=NUM_WARPS,
        )
    return out


def int8_linear_triton(x, weight, scale, bias, group):
    """Products of a part of the output rows each, into their columns of the result."""
    O, I = weight.shape
    x_SI = x.reshape(-1, I)
    y_SO = torch.empty(x_SI.shape[0], O, dtype=x.dtype, device=x.device)
    step = max(BLOCK_O, _CHUNK_BYTES // (I * x.element_size()) // BLOCK_O * BLOCK_O)
    buffer = torch.empty(min(step, O), I, dtype=x.dtype, device=x.device)
    for start in range(0, O, step):
        rows = slice(start, min(start + step, O))
        part = dequantise_int8_triton(weight[rows], scale[rows], group, x.dtype, buffer[: rows.stop - start])
        if bias is None:
            torch.mm(x_SI, part.T, out=y_SO[:, rows])
        else:
            torch.addmm(bias[rows], x_SI, part.T, out=y_SO[:, rows])
    return y_SO.view(*x.shape[:-1], O)
