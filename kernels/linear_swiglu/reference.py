"""Ground truth for linear_swiglu, in fp32."""

import torch
import torch.nn.functional as F


def linear_swiglu_reference(x_SC, weight_2FC, bias_2F):
    value, gate = F.linear(x_SC.float(), weight_2FC.float(), bias_2F.float()).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * value).to(x_SC.dtype)
