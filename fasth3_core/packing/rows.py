"""Latents to token rows and back."""

import torch

from ..config import PATCH


def patchify(latent: torch.Tensor) -> torch.Tensor:
    """Video latent [1, C, T, H, W] -> rows [T * H/2 * W/2, C * 4]; raster order, features channel-major (c, ph, pw)."""
    _, C, T, H, W = latent.shape
    x = latent.reshape(C, T, H // PATCH, PATCH, W // PATCH, PATCH)
    return x.permute(1, 2, 4, 0, 3, 5).reshape(T * (H // PATCH) * (W // PATCH), C * PATCH * PATCH)


def unpatchify(rows: torch.Tensor, T: int, H: int, W: int) -> torch.Tensor:
    """Inverse of `patchify`; T, H, W are latent sizes."""
    C = rows.shape[-1] // (PATCH * PATCH)
    x = rows.reshape(T, H // PATCH, W // PATCH, C, PATCH, PATCH)
    return x.permute(3, 0, 1, 4, 2, 5).reshape(1, C, T, H, W)


def pack_audio(latent: torch.Tensor) -> torch.Tensor:
    """Audio latent [1, C, 2, A] -> rows [2A, C], left channel first."""
    return latent[0].permute(1, 2, 0).reshape(-1, latent.shape[1])


def unpack_audio(rows: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_audio`: [2A, C] -> [1, C, 2, A]."""
    return rows.reshape(2, rows.shape[0] // 2, rows.shape[1]).permute(2, 0, 1).unsqueeze(0)
