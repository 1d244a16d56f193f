"""swiglu with torch alone."""

import torch.nn.functional as F


def swiglu_eager(x_S2F, gate_first):
    first, second = x_S2F.chunk(2, dim=-1)
    gate, value = (first, second) if gate_first else (second, first)
    return F.silu(gate).mul_(value)
