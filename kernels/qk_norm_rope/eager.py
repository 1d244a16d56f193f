"""qk_norm_rope with torch alone, in place on slices of the fused projection, a bounded number of rows at once."""

import torch.nn.functional as F

ROWS = 8192
"""Rows a pass: at 56 heads x 128 in bf16 the temporaries stay under half a GB at any sequence length."""


def qk_norm_rope_eager(q_SHD, k_SHD, q_weight_D, k_weight_D, cos_SR, sin_SR, eps):
    R = cos_SR.shape[-1]
    for x_SHD, weight_D in ((q_SHD, q_weight_D), (k_SHD, k_weight_D)):
        for start in range(0, x_SHD.shape[0], ROWS):
            x = x_SHD[start : start + ROWS]
            cos, sin = cos_SR[start : start + ROWS, None], sin_SR[start : start + ROWS, None]
            normed = F.rms_norm(x, weight_D.shape, weight_D, eps)
            first, second = normed[..., :R], normed[..., R : 2 * R]
            x[..., :R] = first * cos - second * sin
            x[..., R : 2 * R] = second * cos + first * sin
            x[..., 2 * R :] = normed[..., 2 * R :]
