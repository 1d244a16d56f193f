"""What is wrong with a sound track, before it is muxed: the audio stream is the one that breaks first."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

_CLIP_LEVEL = 0.999
_CLIP_FRACTION = 0.01
_DC_LEVEL = 0.05
_SILENCE_RMS = 1e-4
_CONSTANT = 1e-5
"""Swing of a channel below which it does not move at all."""
_SPIKE = 0.4
"""How far a click stands off the line between its neighbours ..."""
_SPIKE_RATIO = 25.0
"""... and how many times farther than the samples around it do on average. White noise reaches 6, a drum about 10."""
_AROUND = 801
"""Samples around a click, 25 ms at 32 kHz."""


@dataclass(frozen=True, slots=True)
class AudioProbe:
    """Levels of one waveform. `warnings` is empty for a healthy one."""

    peak: float = 0.0
    rms: float = 0.0
    offset: float = 0.0
    """Largest mean of a channel."""
    clipped: float = 0.0
    """Share of the samples at full scale."""
    jump: float = 0.0
    """Largest step between neighbouring samples."""
    clicks: int = 0
    not_finite: int = 0
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_audio(waveform_BCL: torch.Tensor, rate: int = 32000) -> AudioProbe:
    """Measure [B, C, L] in [-1, 1]; each warning carries its number."""
    wave = waveform_BCL.detach().float().cpu()
    if wave.numel() == 0:
        return AudioProbe(warnings=("the sound track is empty",))
    bad = ~wave.isfinite()
    not_finite = int(bad.sum())
    warnings = []
    if not_finite:
        first = int(bad.flatten(0, 1).any(dim=0).nonzero()[0])
        warnings.append(
            f"{not_finite} samples ({not_finite / wave.numel():.1%}) are not finite numbers and were silenced, the "
            f"first at {first / rate:.2f} s"
        )
    wave = wave.nan_to_num(0.0, 0.0, 0.0)
    channels = wave.flatten(0, 1)
    rms = float(wave.square().mean().sqrt())
    clipped = float((wave.abs() >= _CLIP_LEVEL).float().mean())
    offset = float(channels.mean(dim=-1).abs().max())
    jump = float(channels.diff(dim=-1).abs().max()) if wave.shape[-1] > 1 else 0.0
    clicks, largest, where = _clicks(channels)
    if clipped > _CLIP_FRACTION:
        warnings.append(f"{clipped:.0%} of the samples are clipped")
    if offset > _DC_LEVEL:
        warnings.append(f"a channel sits {offset:.2f} off zero (DC offset)")
    if rms < _SILENCE_RMS:
        warnings.append(f"the sound track is silent (RMS {rms:.1e})")
    else:
        warnings += _still(channels)
    if clicks:
        warnings.append(f"{clicks} click{'s' * (clicks > 1)}, the largest {largest:.2f} high at {where / rate:.2f} s")
    return AudioProbe(
        float(wave.abs().max()), rms, offset, clipped, jump, clicks, not_finite, tuple(warnings)
    )


def _still(channels_CL: torch.Tensor) -> list[str]:
    """Channels that never move, where another does or where they rest off zero."""
    low, high = channels_CL.amin(dim=-1), channels_CL.amax(dim=-1)
    return [
        f"channel {number} is constant at {float(low[number]):.3f}"
        for number in (high - low < _CONSTANT).nonzero().flatten().tolist()
    ]


def _clicks(channels_CL: torch.Tensor) -> tuple[int, float, int]:
    """How many samples stand off the line between their neighbours as no sound does, how far the worst one does, and
    which that is. A click of several samples, or on both channels, counts once."""
    if channels_CL.shape[-1] < 3:
        return 0, 0.0, 0
    off_CL = (channels_CL[:, 1:-1] - (channels_CL[:, :-2] + channels_CL[:, 2:]) / 2).abs()
    around = F.avg_pool1d(off_CL[:, None], _AROUND, 1, _AROUND // 2, count_include_pad=False)[:, 0]
    heights_CL = off_CL * ((off_CL > _SPIKE) & (off_CL > _SPIKE_RATIO * around))
    heights_L = heights_CL.amax(dim=0)
    is_click = heights_L > 0
    begins = is_click & ~F.pad(is_click, (1, -1))
    return int(begins.sum()), float(heights_L.max()), int(heights_L.argmax()) + 1
