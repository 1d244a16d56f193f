"""Triton swiglu. One program a token and block of channels: both halves are read once, the product is written once."""

import torch
import triton
import triton.language as tl

from ..device import check_last_dim

BLOCK_F = 4096
NUM_WARPS = 4
"""0.337 ms for 16,384 tokens x 14336 in bf16 on an H200 (98 % of a copy's rate); 512 to 2048: 0.340 to 0.344."""


@triton.jit
def _swiglu_kernel(
    gate_ptr, value_ptr, out_ptr,
    stride_gate, stride_value,
    F,
    BLOCK_F: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = cols < F
    gate = tl.load(gate_ptr + token * stride_gate + cols, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_F]
    value = tl.load(value_ptr + token * stride_value + cols, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * value
    tl.store(out_ptr + token * F + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu_triton(x, gate_first):
    check_last_dim("swiglu", x=x)
    S, F = x.shape[0], x.shape[1] // 2
    first, second = x.chunk(2, dim=-1)
    gate, value = (first, second) if gate_first else (second, first)
    out = torch.empty(S, F, dtype=x.dtype, device=x.device)
    block = min(BLOCK_F, triton.next_power_of_2(F))
    with torch.cuda.device_of(x):
        _swiglu_kernel[(S, triton.cdiv(F, block))](
            gate, value, out,
            gate.stride(0), value.stride(0),
            F,
            BLOCK_F=block,
            num_warps=NUM_WARPS,
        )
    return out
