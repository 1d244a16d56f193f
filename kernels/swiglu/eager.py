"""swiglu with torch alone, in place on the gate. silu rounds on the way, as in the released decoder."""

import torch.nn.functional as F

from ..quantise_rows.eager import quantise_rows_eager


def swiglu_eager(value_SF, gate_SF, bias_2F=None, form=""):
    if bias_2F is not None:
        value_bias, gate_bias = bias_2F.chunk(2)
        value_SF, gate_SF = value_SF.add_(value_bias), gate_SF.add_(gate_bias)
    out = F.silu(gate_SF, inplace=True).mul_(value_SF)
    return quantise_rows_eager(out, form) if form else out
