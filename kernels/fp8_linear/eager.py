"""fp8_linear with torch alone, on any device: both sides dequantised, the weight some output rows at a time."""

import torch

_BYTES = 64 << 20
"""Of dequantised weight at a time."""


def fp8_linear_eager(x, weight, dtype, out=None):
    (O, I), S = weight.data.shape, x.data.shape[0]
    x_SI = x.dequantise(dtype)
    y_SO = torch.empty(S, O, dtype=dtype, device=x_SI.device) if out is None else out
    step = max(1, _BYTES // (dtype.itemsize * I))
    for start in range(0, O, step):
        rows = slice(start, start + step)
        torch.mm(x_SI, weight[rows].dequantise(dtype).T, out=y_SO[:, rows])
    return y_SO
