"""int8 weights with torch alone: some output rows at a time, so the float weight of a product never exists whole."""

import torch
import torch.nn.functional as F

from .reference import dequantise_int8_reference

_BYTES = 64 << 20
"""Of fp32 weight at a time."""


def dequantise_int8_eager(weight_OI, scale_O, group, dtype):
    W_OI = torch.empty(weight_OI.shape, dtype=dtype, device=weight_OI.device)
    for rows, W in _row_blocks(weight_OI, scale_O, group):
        W_OI[rows] = W
    return W_OI


def int8_linear_eager(x_SI, weight_OI, scale_O, bias_O, group, out=None):
    y_SO = out
    if y_SO is None:
        y_SO = torch.empty(*x_SI.shape[:-1], weight_OI.shape[0], dtype=x_SI.dtype, device=x_SI.device)
    for rows, W in _row_blocks(weight_OI, scale_O, group):
        y_SO[..., rows] = F.linear(x_SI, W.to(x_SI.dtype), None if bias_O is None else bias_O[rows])
    return y_SO


def _row_blocks(weight_OI, scale_O, group):
    scale_O = scale_O.reshape(-1)
    step = max(1, _BYTES // (4 * weight_OI.shape[1]))
    for start in range(0, weight_OI.shape[0], step):
        rows = slice(start, start + step)
        yield rows, dequantise_int8_reference(weight_OI[rows], scale_O[rows], group)
