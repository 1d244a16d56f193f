"""Ground truth for head_norm_rope. S tokens of sequences N long, H heads, D head channels."""

import torch


def head_norm_rope_reference(x_SHD, bias_HD, rotations_NR, eps):
    """(x + bias) / rms over a head, then each pair (2i, 2i + 1) turned by its angle; fp32 inside, one rounding."""
    x = x_SHD.float() if bias_HD is None else x_SHD.float() + bias_HD.float()
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
    turns = rotations_NR.repeat(x.shape[0] // rotations_NR.shape[0], 1)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([even * turns.real - odd * turns.imag, odd * turns.real + even * turns.imag], dim=-1)
    x_SHD.copy_(turned.flatten(-2))
