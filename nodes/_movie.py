"""What the saving nodes share: sound checked before it is muxed, settings tried out, and what a file tells."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..fasth3_core.atomic import replacing
from ..fasth3_core.media.delivery import try_out
from ..fasth3_core.media.formats import Output
from ..fasth3_core.media.probe import AudioProbe, probe_audio
from ..fasth3_core.media.sound import Sound, fit, write_wav
from ..fasth3_core.report.run_report import RunReport
from . import _host

log = logging.getLogger("fasth3")


@dataclass(frozen=True)
class Track:
    """Sound that is ready to be muxed, or None where there is none or the encoder refuses it."""

    sound: Sound | None = None
    probe: AudioProbe | None = None
    warnings: tuple[str, ...] = ()
    keep_raw: Callable[[], tuple[str, ...]] = tuple
    """Writes the sound as it came beside the video, if there is reason to; called once the video is there, which is not
    lost if this fails: a line says so."""


def check_sound(
    path: Path, output: Output, width: int, height: int, frames: int, wave_CL: torch.Tensor | None, rate: int
) -> Track:
    """Look at the sound and try the settings out. The raw sound is to be kept beside `path` if anything is wrong with
    it, or if the format has no track for it.

    Raises what writing the file would raise for another reason than its sound.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if wave_CL is None:
        try_out(path.parent, output, width, height, None)
        return Track()
    sound, probe = fit(wave_CL, rate, frames), probe_audio(wave_CL[None], rate)
    warnings = list(probe.warnings)
    try:
        try_out(path.parent, output, width, height, sound)
    except Exception as error:
        try_out(path.parent, output, width, height, None)  # raises if it is not the sound
        log.warning("FastH3: the sound cannot be encoded", exc_info=True)
        warnings.append(f"the sound cannot be encoded as {output.audio_codec} and is not in the file: {error}")
        sound = None
    nothing_to_keep = not warnings and (output.audio_codec != "none" or output.audio == "none")
    if nothing_to_keep or not wave_CL.numel():
        return Track(sound, probe, tuple(warnings))
    raw = beside(path, output, ".wav")
    if warnings:
        warnings.append(f"the raw sound is kept in {raw.name}")
    return Track(sound, probe, tuple(warnings), lambda: _keep(raw, wave_CL, rate))


def _keep(path: Path, wave_CL: torch.Tensor, rate: int) -> tuple[str, ...]:
    try:
        with replacing(path) as partial:
            write_wav(partial, wave_CL, rate)
    except Exception as error:
        log.warning("FastH3: the raw sound cannot be kept", exc_info=True)
        return (f"warning: {path.name} could not be written: {error}",)
    return ()


def beside(path: Path, output: Output, suffix: str) -> Path:
    """A file of the same name and number with another ending."""
    return path.with_name(path.name.removesuffix(output.form.suffix) + suffix)


def metadata(node: type, host: _host.Host, report: RunReport | None, track: Track, **facts: Any) -> dict[str, Any]:
    """The workflow, for the editor, and the report of the run with what was found out about its sound."""
    if not host.wants_metadata():
        return {}
    found: dict[str, Any] = dict(node.hidden.extra_pnginfo or {})
    if node.hidden.prompt:
        found["prompt"] = node.hidden.prompt
    if report is not None:
        found["fasth3_report"] = report.to_dict()
    sound = None if track.probe is None else track.probe.to_dict() | {"warnings": track.warnings}
    return found | {"fasth3_output": {**facts, "sound": sound}}


def lines(track: Track) -> list[str]:
    """For the node and the log."""
    levels = [] if track.probe is None else [f"sound peak {track.probe.peak:.2f}, RMS {track.probe.rms:.3f}"]
    return levels + [f"warning: {text}" for text in track.warnings]
