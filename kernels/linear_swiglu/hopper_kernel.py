"""linear_swiglu for Hopper GPUs: describes the matrices to the copy engine, and launches.

The device code is hopper_gluon.py. What was measured, and what lost: bench/README.md, "VAE decode".
"""

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..device import check_last_dim
from .hopper_gluon import CHANNELS, GROUP_TOKENS, OUTPUTS, linear_swiglu_kernel
from .reference import linear_swiglu_reference

LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
STAGES, BAND, LAG = 4, 16, 2
REGISTERS, COPY_REGISTERS, MAX_REGISTERS = 240, 24, 168
"""Of a thread of the second group, of the copying warp, and at the start, when all 12 warps have as many."""


_SELF_CHECK_ERROR = 1e-2
"""Relative, of a small case against fp32; 5e-3 is what bf16 loses."""


def self_check(device: torch.device, dtype: torch.dtype) -> None:
    """Run a small case against fp32: compilers other than the one it was written on get to show that they agree.

    Raises:
        RuntimeError: the result is wrong. Whatever the compiler, the assembler or the driver raise passes through.
    """
    generator = torch.Generator(device).manual_seed(0)
    S, C, F = 2050, 336, 1168  # more tiles than programs, more channels than stages hold; none fits the tiles
    x, weight, bias = (
        torch.randn(*shape, device=device, generator=generator).to(dtype) for shape in ((S, C), (2 * F, C), (2 * F,))
    )
    expected = linear_swiglu_reference(x.float(), weight, bias)
    error = ((linear_swiglu_hopper(x, weight, bias).float() - expected).norm() / expected.norm()).item()
    if not error < _SELF_CHECK_ERROR:
        raise RuntimeError(f"relative error {error:.1e} on a small case, expected below {_SELF_CHECK_ERROR}")


def linear_swiglu_hopper(x, weight, bias):
    S, C = x.shape
    if C % 8 or weight.shape[0] % 16 or x.stride(0) % 8 or x.data_ptr() % 16 or not weight.is_contiguous():
        raise ValueError(
            f"linear_swiglu: the copy engine wants rows 16 bytes apart, got x {list(x.shape)} with strides "
            f"{x.stride()} and weight {list(weight.shape)} with {weight.stride()}"
        )
    check_last_dim("linear_swiglu", x=x, bias=bias)
    F = weight.shape[0] // 2
    out = torch.empty(S, F, dtype=x.dtype, device=x.device)
    boxes = (_boxes(x, GROUP_TOKENS.value, CHANNELS.value), _boxes(weight, OUTPUTS.value, CHANNELS.value),
             _boxes(out, GROUP_TOKENS.value, OUTPUTS.value))  # fmt: skip
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    with torch.cuda.device_of(x):
        linear_swiglu_kernel[(programs,)](
            *boxes, bias, S, F, C,
            STAGES=STAGES, BAND=BAND, LAG=LAG, COPY_REGISTERS=COPY_REGISTERS, REGISTERS=REGISTERS,
            num_warps=4, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return out


def _boxes(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns], LAYOUT)
