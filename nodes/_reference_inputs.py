"""What is connected to FastH3 References: checked, in order, and ready to be encoded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..fasth3_core.media.film import Film, FramesFilm, open_film
from ..fasth3_core.media.reference_pixels import check_image, film_pixels, picture_pixels
from ..fasth3_core.media.references import picture_size, video_size
from ..fasth3_core.media.resample import reference_sound
from ..fasth3_core.packing.geometry import FPS, SAMPLE_RATE
from . import _host

Slots = Mapping[str, Any] | None
"""Name -> value, or None where nothing is connected: a growing input of the node."""


@dataclass(frozen=True)
class Wanted:
    """One reference before it is encoded."""

    kind: str
    """As of packing.layout.Reference."""
    told: str
    clip: Callable[[], torch.Tensor] | None = None
    """Makes its bytes [1, 3, F, H, W], for a video all frames that the video to make has time for."""
    wave: torch.Tensor | None = None
    """[2, 1, L] at 32 kHz."""


@dataclass(frozen=True)
class Rules:
    frames: int
    """Of the video to make, as are height and width, in pixels."""
    height: int
    width: int
    size: str
    background: float | None
    soundtracks: bool

    def wanted(self, images: Slots, videos: Slots, audios: Slots) -> list[Wanted]:
        """Pictures, then videos, then sounds. Files are opened and sounds read; no picture is made yet."""
        return [
            *(self._picture(image) for batch in _given(images) for image in _checked(batch)),
            *(self._video(video) for video in _given(videos)),
            *(self._sound(audio) for audio in _given(audios)),
        ]

    def _picture(self, image_HWC: torch.Tensor) -> Wanted:
        canvas = self.height, self.width
        h, w = image_HWC.shape[:2]
        height, width = picture_size(h, w, self.size, canvas)
        clip = partial(picture_pixels, image_HWC, self.size, canvas, self.background)
        return Wanted("image", f"picture {w}x{h} -> {width}x{height}", clip)

    def _video(self, video: Any) -> Wanted:
        film = _film(video)
        height, width = video_size(film.height, film.width, self.size)
        track = film.sound(self.frames / FPS) if self.soundtracks else None
        told = f"video {film.width}x{film.height} -> {width}x{height}"
        clip = partial(film_pixels, film, self.size, self.frames, _host.get().check_interrupt)
        if track is None:
            return Wanted("video", told, clip)
        wave = reference_sound(*track, self.frames)
        return Wanted("video_audio", f"{told} with {_seconds(wave)} of sound", clip, wave)

    def _sound(self, audio: Mapping[str, Any]) -> Wanted:
        wave = reference_sound(audio["waveform"], audio["sample_rate"], self.frames)
        return Wanted("audio", f"sound of {_seconds(wave)}", wave=wave)


def _given(slots: Slots) -> list[Any]:
    return [value for value in (slots or {}).values() if value is not None]


def _checked(images: torch.Tensor) -> torch.Tensor:
    check_image(images, "images")
    return images


def _film(video: Any) -> Film:
    if _host.has_file(video):
        return open_film(video.get_stream_source(), *video.get_active_trim_window())
    parts = video.get_components()
    track = None if parts.audio is None else (parts.audio["waveform"], parts.audio["sample_rate"])
    return FramesFilm(parts.images, float(parts.frame_rate), track)


def _seconds(wave: torch.Tensor) -> str:
    return f"{wave.shape[2] / SAMPLE_RATE:.1f} s"
