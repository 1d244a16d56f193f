"""Films as references: frames with their own times, upright and RGB, one after another, and their sound."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Protocol

import av
import torch
from PIL import Image

from ..errors import ConfigError, FastH3Error
from ..packing.geometry import FPS
from .images import to_image
from .references import Timed

Picture = Callable[[], Image.Image]
"""Makes the picture of a frame; not called for frames that nobody sees."""
Track = tuple[torch.Tensor, int]
"""Sound [1, C, L], and its samples a second."""


class Film(Protocol):
    height: int
    width: int

    def frames(self) -> Iterator[Timed[Picture]]:
        """Every frame, in order."""

    def sound(self, seconds: float) -> Track | None:
        """The first `seconds` of the sound; None for a film without."""


@dataclass(frozen=True)
class FramesFilm:
    """Frames [F, H, W, 3 or more] in [0, 1] at a constant rate; of more than three channels the first are taken."""

    frames_FHWC: torch.Tensor
    rate: float
    track: Track | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError("frame_rate", self.rate, "frames a second above 0", "Set it on Create Video.")
        if self.frames_FHWC.ndim != 4 or self.frames_FHWC.shape[-1] < 3 or not all(self.frames_FHWC.shape):
            shape = list(self.frames_FHWC.shape)
            raise ConfigError("images", f"frames of shape {shape}", "[F, height, width, 3]", "Load the video again.")

    @property
    def height(self) -> int:
        return self.frames_FHWC.shape[1]

    @property
    def width(self) -> int:
        return self.frames_FHWC.shape[2]

    def frames(self) -> Iterator[Timed[Picture]]:
        for i, frame_HWC in enumerate(self.frames_FHWC):
            yield Timed(i / self.rate, (i + 1) / self.rate, lambda i=i, frame=frame_HWC: _finite_image(frame, i))

    def sound(self, seconds: float) -> Track | None:
        if self.track is None:
            return None
        wave_BCL, rate = self.track
        return wave_BCL[..., : int(seconds * rate)], rate


@dataclass(frozen=True)
class FileFilm:
    """A video file, or one in memory, from `start` on, for `duration` seconds; 0 is to its end.

    `height` and `width` are those of an upright frame, `first` is the time of the first one. Made by `open_film`.
    """

    source: str | os.PathLike | IO[bytes]
    start: float
    duration: float
    height: int
    width: int
    first: float

    def frames(self) -> Iterator[Timed[Picture]]:
        for timed in _decoded(self.source, self.start, self.duration):
            yield Timed(timed.start, timed.stop, lambda frame=timed.item: _upright(frame))

    def sound(self, seconds: float) -> Track | None:
        seconds = min(seconds, self.duration or seconds)
        with _open(self.source) as container:
            stream = next((s for s in container.streams.audio if s.codec_context is not None), None)
            if stream is None:
                return None
            rate = stream.codec_context.sample_rate
            if self.start:
                container.seek(int(self.start / stream.time_base), stream=stream)
            length, end, wave_CL = int(seconds * rate), 0, None
            for part_CL, time in _samples(container, stream):
                if wave_CL is None:
                    wave_CL = part_CL.new_zeros(part_CL.shape[0], length)
                # it keeps its place beside the pictures: what is before them is cut, a late start is silence
                at = round((time - self.first) * rate)
                if at >= length:
                    break
                part_CL, begin = part_CL[:, max(0, -at) :], max(0, at)
                end = min(length, begin + part_CL.shape[1])
                wave_CL[:, begin:end] = part_CL[:, : end - begin]
            return (wave_CL[None, :, :end], rate) if end else None


def _finite_image(frame_HWC: torch.Tensor, number: int) -> Image.Image:
    if not bool(frame_HWC.isfinite().all()):
        raise FastH3Error(f"frame {number} of a reference video has NaN or infinity in it. Decode it in bf16 or fp32.")
    return to_image(frame_HWC[..., :3])


def open_film(source: str | os.PathLike | IO[bytes], start: float = 0.0, duration: float = 0.0) -> FileFilm:
    """A film of a file, with its first frame looked at. Raises FastH3Error for a file that is no video, or has no frame
    there."""
    first = next(_decoded(source, start, duration), None)
    if first is None:
        span = f" between {start:g} s and {start + duration:g} s" if duration else f" from {start:g} s on"
        raise FastH3Error(f"{_name(source)} has no frame{span if start or duration else ''}.")
    frame = first.item
    height, width = (frame.width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, frame.width)
    return FileFilm(source, start, duration, height, width, first.start)


def _decoded(source, start: float, duration: float) -> Iterator[Timed[av.VideoFrame]]:
    with _open(source) as container:
        if not container.streams.video:
            raise FastH3Error(f"{_name(source)} has no video in it.")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        if start:
            container.seek(int(start / stream.time_base), stream=stream)
        end, previous = start + duration if duration else math.inf, None
        for frame in container.decode(stream):
            if frame.time is None:
                raise FastH3Error(f"{_name(source)} has frames without a time. Convert it to MP4.")
            if frame.pts < int(start / stream.time_base):
                continue
            if previous is not None:
                yield Timed(previous.time, min(frame.time, end), previous)
            if frame.time >= end:
                return
            previous = frame
        if previous is not None:
            length = previous.duration * previous.time_base if previous.duration else 1 / (stream.average_rate or FPS)
            yield Timed(previous.time, min(previous.time + float(length), end), previous)


def _samples(container, stream) -> Iterator[tuple[torch.Tensor, float]]:
    """Samples [C, n] of a track as floats, and when they start."""
    resampler = av.AudioResampler(format="fltp")
    for frame in container.decode(stream):
        for part in resampler.resample(frame):
            yield torch.from_numpy(part.to_ndarray()), float(part.pts * part.time_base)


@contextmanager
def _open(source):
    if hasattr(source, "seek"):
        source.seek(0)
    try:
        opened = source if hasattr(source, "read") else os.fspath(source)
        with av.open(opened, metadata_errors="replace") as container:  # tags of old files are not all UTF-8
            yield container
    except (av.error.FFmpegError, OSError) as error:
        raise FastH3Error(f"{_name(source)} cannot be read as a video: {error}") from error


def _name(source) -> str:
    return "a video in memory" if hasattr(source, "read") else os.path.basename(os.fspath(source))


def _quarter_turns(frame: av.VideoFrame) -> int:
    """Turns by 90 degrees to the left that bring a frame upright."""
    return round(frame.rotation / 90) % 4


def _upright(frame: av.VideoFrame) -> Image.Image:
    image = frame.to_image()
    turns = {1: Image.Transpose.ROTATE_90, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_270}
    turn = turns.get(_quarter_turns(frame))
    return image if turn is None else image.transpose(turn)
