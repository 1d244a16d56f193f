"""Ground truth for qk_norm_rope. S tokens, H heads, D head channels, R rotated pairs."""

import torch


def qk_norm_rope_reference(x_SHD, weight_D, cos_SR, sin_SR, eps):
    """Per-head RMSNorm, then rotation of the pairs (i, i + R) for i < R, in fp32; channels from 2R on pass through."""
    x = x_SHD.float()
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight_D.float()
    R = cos_SR.shape[-1]
    first, second, rest = x[..., :R], x[..., R : 2 * R], x[..., 2 * R :]
    cos, sin = cos_SR.float()[:, None], sin_SR.float()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x_SHD.dtype)
