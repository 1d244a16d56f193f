"""Sound at any rate to 32 kHz stereo, as the audio VAE takes it. C channels, L samples."""

import av
import numpy as np
import torch

from ..errors import ConfigError, FastH3Error, GeometryError
from ..packing.geometry import FPS, SAMPLE_RATE

_RATES = (1000, 1_000_000)
"""Any sound's, and none that FFmpeg's resampler has no filter for."""


def reference_sound(waveform_BCL: torch.Tensor, rate: int, frames: int) -> torch.Tensor:
    """First sound of a batch as [2, 1, L] at 32 kHz, for the audio VAE to encode.

    Mono goes to both channels, and so does the mean of more than two. What is longer than the video to make, of
    `frames` frames, is cut. Raises GeometryError, ConfigError, FastH3Error for what is no sound.
    """
    if waveform_BCL.ndim != 3 or not all(waveform_BCL.shape):
        raise GeometryError(f"a reference sound of shape {list(waveform_BCL.shape)}: expected [1, channels, samples].")
    if not _RATES[0] <= rate <= _RATES[1]:
        allowed = f"{_RATES[0]} to {_RATES[1]} samples a second"
        raise ConfigError("sample_rate", rate, allowed, "Load the sound with LoadAudio.")
    wave_CL = waveform_BCL[0, :, : int(frames / FPS * rate)].detach().float().cpu()
    if not bool(wave_CL.isfinite().all()):
        raise FastH3Error("a reference sound has NaN or infinity in it. Load it again, or leave it out.")
    if wave_CL.shape[0] > 2:
        wave_CL = wave_CL.mean(dim=0, keepdim=True)
    return resample(wave_CL, rate, SAMPLE_RATE).expand(2, -1)[:, None]


def resample(wave_CL: torch.Tensor, rate: int, to: int) -> torch.Tensor:
    """One or two channels [C, L] fp32 at `rate` -> [C, ceil(L * to / rate)] at `to`, by FFmpeg's resampler.

    Raises GeometryError for a sound that is shorter than its filter, some milliseconds.
    """
    if rate == to:
        return wave_CL
    layout = "mono" if wave_CL.shape[0] == 1 else "stereo"
    frame = av.AudioFrame.from_ndarray(wave_CL.contiguous().numpy(), format="fltp", layout=layout)
    frame.sample_rate = rate
    resampler = av.AudioResampler("fltp", layout, to)
    parts = [part.to_ndarray() for part in (*resampler.resample(frame), *resampler.resample(None))]
    if not parts:
        raise GeometryError(
            f"a sound of {wave_CL.shape[1]} samples at {rate} a second is too short. Leave it out, or set video_sound "
            "to 'drop' if it is a video's."
        )
    return torch.from_numpy(np.concatenate(parts, axis=1))
