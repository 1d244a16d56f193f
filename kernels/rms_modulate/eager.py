"""rms_modulate with torch alone: one norm, then one multiply-add a segment, in place on the norm's output."""

import torch
import torch.nn.functional as F

from ..quantise_rows.eager import quantise_rows_eager


def rms_modulate_eager(x_SC, weight_C, scale_RC, shift_RC, segments, eps, form=""):
    out = F.rms_norm(x_SC, weight_C.shape, weight_C, eps)
    for start, stop, row in segments.spans:
        torch.addcmul(shift_RC[row], out[start:stop], 1.0 + scale_RC[row], out=out[start:stop])
    return quantise_rows_eager(out, form) if form else out
