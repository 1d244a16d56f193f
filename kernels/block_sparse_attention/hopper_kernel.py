"""block_sparse_attention for Hopper GPUs: packs the lists, describes q, k and v to the copy engine, launches.

The device code is hopper_gluon.py. What was measured, and what lost: bench/README.md, "Hopper".
"""

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_gluon import attention_kernel
from .hopper_ring import ATOM, GRANULE, HEAD_DIM, PER_STEP, TILE
from .steps import pack_lists

STAGES = 3
"""With Q they fill half of a multiprocessor's shared memory, 112 of 227 KB: two programs share one."""

MAX_REGISTERS = 128
"""Per thread at launch, so that two programs of 8 warps fit; the copying warps then hand theirs to the others."""

COPY_REGISTERS = 40
"""Of these 16 hold the codes of two steps."""

_TABLE_BYTES = 256 << 20
"""Of packed lists at a time; heads beyond it wait their turn."""

_SELF_CHECK_ERROR = 5e-3
"""bf16 inputs and probabilities lose 2.3e-3."""

_LOG2_E = 1.4426950408889634


def block_sparse_attention_hopper(q_MHD, k_SHD, v_SHD, offsets_N1, index_HVK, count_HV, *, out=None, byte_budget=None):
    H, V, K = index_HVK.shape
    out = torch.empty(q_MHD.shape, dtype=q_MHD.dtype, device=q_MHD.device) if out is None else out
    q, k, v = map(_copyable, (q_MHD, k_SHD, v_SHD))
    group = max(1, _TABLE_BYTES // (V * K * 4 * PER_STEP.value))
    with torch.cuda.device_of(q):
        for first in range(0, H, group):
            heads = slice(first, min(first + group, H))
            _attend(q[:, heads], k[:, heads], v[:, heads], offsets_N1, index_HVK[heads], count_HV[heads], out[:, heads])
    return out


def self_check(device: torch.device, dtype: torch.dtype) -> None:
    """Run a small case against torch: compilers other than the one it was written on get to show that they agree.

    Raises:
        RuntimeError: the result is wrong. Whatever the compiler, the assembler or the driver raise passes through.
    """
    bounds = [0, 64, 77, 141, 181, 202]  # tiles of 64, 13, 64, 40 and 21: every path through the kernel
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn(bounds[-1], 3, 2, HEAD_DIM.value, device=device, generator=generator).to(dtype).unbind(1)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    index = torch.arange(5, dtype=torch.int32, device=device).expand(2, 5, 5)
    count = torch.full((2, 5), 5, dtype=torch.int32, device=device)
    out = block_sparse_attention_hopper(q, k, v, offsets, index, count).float()
    weights = torch.einsum("mhd,shd->hms", q.float(), k.float()).mul_(HEAD_DIM.value**-0.5).softmax(-1)
    expected = torch.einsum("hms,shd->mhd", weights, v.float())
    error = ((out - expected).norm() / expected.norm()).item()
    if not error < _SELF_CHECK_ERROR:
        raise RuntimeError(f"relative error {error:.1e} on a small case, expected below {_SELF_CHECK_ERROR}")


def _attend(q_MHD, k_SHD, v_SHD, offsets_N1, index_HVK, count_HV, out_MHD):
    H, V, K = index_HVK.shape
    lists = pack_lists(offsets_N1, index_HVK, count_HV, k_SHD.shape[0])
    attention_kernel[(H * V,)](
        _boxes(q_MHD, TILE.value, HEAD_DIM.value), *_tile_and_pieces(k_SHD), *_tile_and_pieces(v_SHD),
        q_MHD.stride(1), k_SHD.stride(1), v_SHD.stride(1),
        out_MHD, *out_MHD.stride(),
        offsets_N1, lists.granules, lists.full, lists.steps,
        V, K, offsets_N1.numel() - 1 - V, HEAD_DIM.value**-0.5 * _LOG2_E,
        STAGES=STAGES, COPY_REGISTERS=COPY_REGISTERS, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def _copyable(x_THD: torch.Tensor) -> torch.Tensor:
    """The tensor itself if the copy engine can address it, else a contiguous copy."""
    tokens, heads, _ = x_THD.stride()
    aligned = x_THD.data_ptr() % 16 == 0 and tokens % 8 == 0 and heads % 8 == 0
    return x_THD if aligned and tokens > 0 and heads > 0 and _width(x_THD) < 2**31 else x_THD.contiguous()


def _width(x_THD: torch.Tensor) -> int:
    """Elements from a token's first head to the end of its last."""
    return (x_THD.shape[1] - 1) * x_THD.stride(1) + x_THD.shape[2]


def _boxes(x_THD: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x as a matrix with a row per token, copied in boxes. Rows may overlap: heads need not lie inside tokens."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x_THD, [x_THD.shape[0], _width(x_THD)], [x_THD.stride(0), 1], [rows, columns], layout)


def _tile_and_pieces(x_SHD: torch.Tensor) -> list[TensorDescriptor]:
    pieces = [_boxes(x_SHD, length * GRANULE.value, ATOM.value) for length in (4, 2, 1)]
    return [_boxes(x_SHD, TILE.value, HEAD_DIM.value), *pieces]
