"""Ground truth for qk_norm_rope. S tokens, H heads, D head channels, R rotated pairs."""

import torch


def qk_norm_rope_reference(q_SHD, k_SHD, q_weight_D, k_weight_D, cos_SR, sin_SR, eps):
    """Per-head RMSNorm, then rotation of the pairs (i, i + R) for i < R, in fp32; written once to q and to k."""
    R = cos_SR.shape[-1]
    cos, sin = cos_SR.float()[:, None], sin_SR.float()[:, None]
    for x_SHD, weight_D in ((q_SHD, q_weight_D), (k_SHD, k_weight_D)):
        x = x_SHD.float()
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight_D.float()
        first, second, rest = x[..., :R], x[..., R : 2 * R], x[..., 2 * R :]
        x_SHD.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1))
