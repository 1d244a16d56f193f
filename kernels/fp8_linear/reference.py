"""Ground truth for fp8_linear. S rows, I input and O output features."""

import torch

from ..precision import full_precision_matmul


def fp8_linear_reference(x, weight, dtype, out=None):
    """The product of what the two sides stand for, in fp32; cast once."""
    with full_precision_matmul():
        y_SO = x.dequantise(torch.float32) @ weight.dequantise(torch.float32).T
    return y_SO.to(dtype) if out is None else out.copy_(y_SO)
