"""Ground truth for rms_modulate. S tokens, C channels, R modulation rows."""

import torch

from ..quantise_rows.reference import quantise_rows_reference


def rms_modulate_reference(x_SC, weight_C, scale_RC, shift_RC, segments, eps, form=""):
    """RMSNorm(x) * (1 + scale[r]) + shift[r], every row with the r of its segment, in fp32; cast once to x's dtype."""
    x = x_SC.float()
    normed = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight_C.float()
    out = torch.empty_like(normed)
    for start, stop, row in segments.spans:
        out[start:stop] = normed[start:stop] * (1.0 + scale_RC[row].float()) + shift_RC[row].float()
    return quantise_rows_reference(out, form) if form else out.to(x_SC.dtype)
