"""Ground truth for swiglu. S tokens, F channels."""

import torch

from ..quantise_rows.reference import quantise_rows_reference


def swiglu_reference(value_SF, gate_SF, bias_2F=None, form=""):
    """silu(gate) * value after their biases, in fp32; rounded once."""
    value, gate = value_SF.float(), gate_SF.float()
    if bias_2F is not None:
        value_bias, gate_bias = bias_2F.float().chunk(2)
        value, gate = value + value_bias, gate + gate_bias
    out = gate * torch.sigmoid(gate) * value
    return quantise_rows_reference(out, form) if form else out.to(value_SF.dtype)
