"""What is wrong with a sound track, before it is muxed: the audio stream is the one that breaks first."""

from dataclasses import dataclass

import torch

_CLIP_LEVEL = 0.999
_CLIP_FRACTION = 0.01
_DC_LEVEL = 0.05
_SILENCE_RMS = 1e-4
_JUMP = 1.5
"""A step between neighbouring samples, of at most 2, that no ordinary sound makes at 32 kHz."""


@dataclass(frozen=True, slots=True)
class AudioProbe:
    """Levels of one waveform. `warnings` is empty for a healthy one."""

    peak: float
    rms: float
    warnings: tuple[str, ...]


def probe_audio(waveform_BCL: torch.Tensor) -> AudioProbe:
    """Measure [B, C, L] in [-1, 1]; each warning carries its number."""
    wave = waveform_BCL.detach().float().cpu()
    if wave.numel() == 0:
        return AudioProbe(0.0, 0.0, ("the sound track is empty",))
    bad = int((~wave.isfinite()).sum())
    warnings = [f"{bad} samples are not finite numbers and were silenced"] if bad else []
    wave = wave.nan_to_num(0.0, 0.0, 0.0)
    peak, rms = float(wave.abs().max()), float(wave.square().mean().sqrt())
    clipped = float((wave.abs() >= _CLIP_LEVEL).float().mean())
    offset = float(wave.mean(dim=-1).abs().max())
    jump = float(wave.diff(dim=-1).abs().max()) if wave.shape[-1] > 1 else 0.0
    if clipped > _CLIP_FRACTION:
        warnings.append(f"{clipped:.0%} of the samples are clipped")
    if offset > _DC_LEVEL:
        warnings.append(f"a channel sits {offset:.2f} off zero (DC offset)")
    if rms < _SILENCE_RMS:
        warnings.append("the sound track is silent")
    if jump > _JUMP:
        warnings.append(f"neighbouring samples jump by {jump:.2f} (clicks)")
    return AudioProbe(peak, rms, tuple(warnings))
