"""Ground truth for int8 weights. O output and I input features."""

import torch

from ..precision import full_precision_matmul


def hadamard(order: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Normalised Hadamard matrix, fp32 [order, order], symmetric and its own inverse; order is a power of four."""
    block = 1 - 2 * torch.eye(4, dtype=torch.float32, device=device).flip(1)
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while matrix.shape[0] < order:
        matrix = torch.kron(matrix, block)
    return matrix / order**0.5


def dequantise_int8_reference(weight_OI, scale_O, group):
    """The fp32 weight: integers rotated back in groups of input features, times their row's scale.

    Integers below 128 and the matrix's +-1/sqrt(group) are exact even in bf16, and so are their sums in fp32: no
    precision setting of the process changes the result.
    """
    W_OI = weight_OI.float()
    if group:
        W_OI = (W_OI.view(-1, group) @ hadamard(group, W_OI.device)).view_as(W_OI)
    return W_OI * scale_O.float().reshape(-1, 1)


def int8_linear_reference(x_SI, weight_OI, scale_O, bias_O, group, out=None):
    """x Wᵀ + b in fp32; cast once."""
    with full_precision_matmul():
        y_SO = x_SI.float() @ dequantise_int8_reference(weight_OI, scale_O, group).T
    y_SO = y_SO if bias_O is None else y_SO + bias_O.float()
    return y_SO.to(x_SI.dtype) if out is None else out.copy_(y_SO)
