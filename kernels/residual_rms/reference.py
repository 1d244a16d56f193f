"""Ground truth for residual_rms. S tokens, C channels."""

import torch

from ..quantise_rows.reference import quantise_rows_reference


def residual_rms_reference(x_SC, y_SC, scale_C, bias_C, weight_C, eps, dtype, form=""):
    """x += scale * (y + bias), then x / rms(x) * weight; fp32 inside, one rounding at the end."""
    if y_SC is not None:
        branch = y_SC.float() if bias_C is None else y_SC.float() + bias_C.float()
        x_SC += scale_C * branch
    out = x_SC * torch.rsqrt(x_SC.pow(2).mean(dim=-1, keepdim=True) + eps) * weight_C
    return quantise_rows_reference(out, form) if form else out.to(dtype)
