"""Sound at any rate to 32 kHz stereo, as the audio VAE takes it. C channels, L samples."""

import math

import torch
import torch.nn.functional as F

from ..errors import ConfigError, FastH3Error, GeometryError
from ..packing.geometry import FPS, SAMPLE_RATE

_ZEROS = 6
"""Zero crossings of the sinc on either side."""
_ROLLOFF = 0.99
"""Cutoff, as a share of the lower rate's Nyquist frequency. With `_ZEROS` what torchaudio does by default."""
_BLOCK = 1 << 15


def reference_sound(waveform_BCL: torch.Tensor, rate: int, frames: int) -> torch.Tensor:
    """First sound of a batch as [2, 1, L] at 32 kHz, for the audio VAE to encode.

    Mono goes to both channels, and so does the mean of more than two. What is longer than the video to make, of
    `frames` frames, is cut. Raises GeometryError, ConfigError, FastH3Error for what is no sound.
    """
    if waveform_BCL.ndim != 3 or not all(waveform_BCL.shape):
        raise GeometryError(f"a reference sound of shape {list(waveform_BCL.shape)}: expected [1, channels, samples].")
    if not 0 < rate < math.inf:
        raise ConfigError("sample_rate", rate, "samples a second above 0", "Load the sound with LoadAudio.")
    wave_CL = waveform_BCL[0, :, : int(frames / FPS * rate)].detach().float().cpu()
    if not bool(wave_CL.isfinite().all()):
        raise FastH3Error("a reference sound has NaN or infinity in it. Load it again, or leave it out.")
    if wave_CL.shape[0] > 2:
        wave_CL = wave_CL.mean(dim=0, keepdim=True)
    return resample(wave_CL, rate, SAMPLE_RATE).expand(2, -1)[:, None]


def resample(wave_CL: torch.Tensor, rate: int, to: int) -> torch.Tensor:
    """[C, L] at `rate` -> [C, ceil(L * to / rate)] at `to`: a sinc under a Hann window, for any two rates."""
    if rate == to:
        return wave_CL
    zeros_a_second = _ROLLOFF * min(rate, to)
    reach = math.ceil(_ZEROS * rate / zeros_a_second)
    taps_K = torch.arange(-reach, reach + 1, device="cpu")
    padded_CL = F.pad(wave_CL, (reach, reach))
    length, parts = -(-wave_CL.shape[1] * to // rate), []
    for start in range(0, length, _BLOCK):
        place_N = torch.arange(start, min(start + _BLOCK, length), device="cpu") * rate
        first_N, between_N = place_N // to, (place_N % to).double() / to
        seconds_NK = (taps_K - between_N[:, None]) / rate
        at_NK = (seconds_NK * zeros_a_second).clamp(-_ZEROS, _ZEROS)
        weights_NK = torch.sinc(at_NK) * torch.cos(at_NK * (math.pi / 2 / _ZEROS)).square() * (zeros_a_second / rate)
        around_CNK = padded_CL[:, first_N[:, None] + taps_K + reach]
        parts.append((around_CNK * weights_NK.float()).sum(dim=-1))
    return torch.cat(parts, dim=1)
