"""int8 weights as floats some output rows at a time, for a product of torch's own.

A program keeps some columns of the rotation in shared memory and walks down the output rows. Integers below 128 and the
rotation's +-1/sqrt(group) are exact in fp16, and so are their sums in fp32: only the store rounds.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from ..device import check_last_dim
from .reference import dequantise_int8_reference, hadamard

ROW_BLOCKS = 8
"""Blocks of output rows that a program takes one after the other."""
NUM_WARPS = 4
_LEAST_GROUP = 16
"""Input features of a matrix instruction: smaller rotations stand along the diagonal of one of this size."""

_CHUNK_BYTES = 64 << 20
"""Of float weight at a time: 6144 rows of 5376. From 3072 to 10,752 rows the product is within 2 % of a whole one."""
_STEP = 64
"""Output rows: a multiple of it at a time."""


@triton.jit
def _dequantise_int8_kernel(
    weight_ptr, scale_ptr, rotation_ptr, out_ptr,
    stride_weight,
    O, I,
    GROUP: tl.constexpr, ROW_BLOCKS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    first_col = tl.program_id(0) * BLOCK_I
    cols = first_col + tl.arange(0, BLOCK_I)
    if GROUP > 0:
        turned = tl.arange(0, GROUP)
        rotation = tl.load(rotation_ptr + turned[:, None] * GROUP + (cols % GROUP)[None, :])  # [GROUP, BLOCK_I]
        turned += first_col // GROUP * GROUP
    for block in range(ROW_BLOCKS):
        rows = (tl.program_id(1) * ROW_BLOCKS + block) * BLOCK_O + tl.arange(0, BLOCK_O)
        rows_ptr = weight_ptr + rows.to(tl.int64)[:, None] * stride_weight
        inside = (rows < O)[:, None]
        if GROUP > 0:
            part = tl.load(rows_ptr + turned[None, :], mask=inside, other=0)  # [BLOCK_O, GROUP]
            weight = tl.dot(part.to(tl.float16), rotation)  # [BLOCK_O, BLOCK_I]
        else:
            weight = tl.load(rows_ptr + cols[None, :], mask=inside & (cols < I)[None, :], other=0).to(tl.float32)
        scale = tl.load(scale_ptr + rows, mask=rows < O, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * I + cols[None, :]
        tl.store(
            out_ptrs, (weight * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside & (cols < I)[None, :]
        )


def blocks_for(capability: tuple[int, int]) -> tuple[int, int]:
    """(output rows, input features) at once. 64 x 128: 0.200 ms for 21,504 x 5376 on an H200; 64 x 64 0.233, 128 x 128
    with 8 warps 0.240, 64 x 256 with 8 warps 0.250, 32 x 128 0.372. Turing has shared memory for less."""
    return (64, 128) if capability >= (8, 0) else (32, 16)


@cache
def _rotation(group: int, device: torch.device) -> torch.Tensor:
    """fp16 [G, G]: the rotation of `group` features, repeated along the diagonal up to what one instruction takes."""
    copies = max(1, _LEAST_GROUP // group)
    return torch.block_diag(*[hadamard(group, device)] * copies).half()


def _capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device; elsewhere as the newest, but for AMD, whose shared memory is Turing's."""
    if torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


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
    block_o, block_i = blocks_for(_capability(weight.device))
    block_i = min(block_i, size) if group else block_i
    with torch.cuda.device_of(weight):
        _dequantise_int8_kernel[(triton.cdiv(I, block_i), triton.cdiv(O, block_o * ROW_BLOCKS))](
            weight, scale.reshape(-1), rotation, out,
            weight.stride(0),
            O, I,
            GROUP=size, ROW_BLOCKS=ROW_BLOCKS, BLOCK_O=block_o, BLOCK_I=block_i,
            num_warps=NUM_WARPS,
        )
    return out


def int8_linear_triton(x, weight, scale, bias, group, out=None):
    """Products of a part of the output rows each, into their columns of the result."""
    O, I = weight.shape
    x_SI = x.reshape(-1, I)
    y_SO = torch.empty(x_SI.shape[0], O, dtype=x.dtype, device=x.device) if out is None else out.view(-1, O)
    step = max(_STEP, _CHUNK_BYTES // (I * x.element_size()) // _STEP * _STEP)
    buffer = torch.empty(min(step, O), I, dtype=x.dtype, device=x.device)
    for start in range(0, O, step):
        rows = slice(start, min(start + step, O))
        part = dequantise_int8_triton(weight[rows], scale[rows], group, x.dtype, buffer[: rows.stop - start])
        if bias is None:
            torch.mm(x_SI, part.T, out=y_SO[:, rows])
        else:
            torch.addmm(bias[rows], x_SI, part.T, out=y_SO[:, rows])
    return y_SO.view(*x.shape[:-1], O)
