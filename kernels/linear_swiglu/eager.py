"""linear_swiglu with torch alone: two products instead of one of double width, so that both halves are contiguous, and
what follows works in place.
"""

import torch.nn.functional as F

from ..swiglu.eager import swiglu_eager


def linear_swiglu_eager(x_SC, weight_2FC, bias_2F):
    halves = zip(weight_2FC.chunk(2), bias_2F.chunk(2), strict=True)
    return swiglu_eager(*(F.linear(x_SC, weight, bias) for weight, bias in halves))
