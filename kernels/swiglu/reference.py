"""Ground truth for swiglu. S tokens, F channels."""

import torch


def swiglu_reference(x_S2F, gate_first):
    """silu(gate) * value of the two halves of the last dimension, in fp32; cast once."""
    first, second = x_S2F.float().chunk(2, dim=-1)
    gate, value = (first, second) if gate_first else (second, first)
    return (gate * torch.sigmoid(gate) * value).to(x_S2F.dtype)
