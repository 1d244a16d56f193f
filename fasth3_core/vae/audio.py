"""The audio VAE: raw latents [B, 32, A] <-> waves [B, 1, 800 A] at 32 kHz, one batch item a channel. fp32 only."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels.precision import exact_fp32
from ..errors import CheckpointError, ConfigError, GeometryError
from ..packing.geometry import audio_samples
from . import latents, tensors
from .audio_decoder import AudioDecoder, read_decoder
from .audio_encoder import AudioEncoder, read_encoder
from .audio_weights import fold_weight_norm

HOP = 800
"""Samples of one latent."""


@dataclass(frozen=True)
class AudioVAE:
    """Weights on one device; latents_mean and latents_std are [32]. Immutable: `to` makes another."""

    decoder: AudioDecoder
    encoder: AudioEncoder | None
    latents_mean: torch.Tensor
    latents_std: torch.Tensor
    device: torch.device

    @classmethod
    def from_tensors(
        cls,
        tensors_by_name: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "AudioVAE":
        """Build from diffusers names, with weight norm (either form) or folded. A file without an encoder decodes.

        Raises ConfigError for a dtype other than float32, CheckpointError for tensors that do not fit.
        """
        if dtype != torch.float32:
            raise ConfigError("dtype", dtype, "torch.float32", "The audio VAE is exact in float32 only (0.6 GB).")
        device = torch.device(device)
        reader = tensors.Reader(fold_weight_norm(tensors_by_name), "audio VAE", device)
        channels = reader.shape("dec_in_proj.weight")[1]
        has_encoder = any(name.startswith("encoder.") for name in reader.tensors)
        mean, std = latents.statistics(reader, latents.AUDIO_MEAN, latents.AUDIO_STD, channels)
        encoder = read_encoder(reader, channels) if has_encoder else None
        return cls(read_decoder(reader, channels), encoder, mean, std, device)

    @property
    def nbytes(self) -> int:
        return tensors.nbytes(self)

    def to(self, device: torch.device | str) -> "AudioVAE":
        """The same VAE with its weights on `device`; this one keeps its own."""
        return tensors.moved(self, torch.device(device))

    def normalise(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw latents [B, 32, A] or [1, 32, 2, A] to those that the transformer samples."""
        return latents.normalise(raw, self.latents_mean, self.latents_std)

    def denormalise(self, latent: torch.Tensor) -> torch.Tensor:
        """Inverse of `normalise`."""
        return latents.denormalise(latent, self.latents_mean, self.latents_std)

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        """Waves [B, 1, 800 A] in -1 ... 1 of raw latents [B, 32, A], on the VAE's device."""
        channels = len(self.latents_mean)
        if raw.ndim != 3 or raw.shape[1] != channels or not raw.shape[2]:
            raise GeometryError(f"an audio latent of shape {list(raw.shape)}: expected [B, {channels}, A >= 1]")
        with exact_fp32(self.device):
            return self.decoder(raw.detach().to(self.device).float())

    def encode(self, wave: torch.Tensor) -> torch.Tensor:
        """Raw posterior mean [B, 32, n] of waves [B, 1, L] at 32 kHz, filled up with silence to n = ceil(L / 800)."""
        if self.encoder is None:
            raise CheckpointError(
                "this audio VAE file holds a decoder only. To encode, load one with `encoder.*` tensors."
            )
        if wave.ndim != 3 or wave.shape[1] != 1 or not wave.shape[2]:
            raise GeometryError(f"a wave of shape {list(wave.shape)}: expected [B, 1, L >= 1]")
        padded = F.pad(wave.detach().to(self.device).float(), (0, -wave.shape[2] % HOP))
        with exact_fp32(self.device):
            return self.encoder(padded)

    def to_waveform(self, latent: torch.Tensor, frames: int) -> torch.Tensor:
        """Sound [1, 2, round(frames / 24 * 32000)] of normalised latents [1, 32, 2, A], cut or filled with silence."""
        channels = len(self.latents_mean)
        if latent.ndim != 4 or latent.shape[:2] != (1, channels):
            raise GeometryError(f"an audio latent of shape {list(latent.shape)}: expected [1, {channels}, 2, A]")
        wave = self.decode(self.denormalise(latent)[0].transpose(0, 1))[:, 0]
        return F.pad(wave, (0, audio_samples(frames) - wave.shape[1]))[None]
