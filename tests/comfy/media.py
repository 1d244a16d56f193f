"""What is in a finished MP4, read back with PyAV by decoding all of it."""

from dataclasses import dataclass
from pathlib import Path

import av


@dataclass(frozen=True)
class Movie:
    frames: int
    size: tuple[int, int]
    fps: float
    video_codec: str
    audio_codec: str | None
    audio_rate: int
    audio_channels: int
    audio_seconds: float
    metadata: dict


def probe(path: Path) -> Movie:
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        frames = sum(1 for _ in container.decode(video))
        facts = {
            "frames": frames, "size": (video.width, video.height), "fps": float(video.average_rate),
            "video_codec": video.codec_context.name, "metadata": dict(container.metadata),
        }
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return Movie(**facts, audio_codec=None, audio_rate=0, audio_channels=0, audio_seconds=0.0)
        audio = container.streams.audio[0]
        samples = sum(frame.samples for frame in container.decode(audio))
        return Movie(**facts, audio_codec=audio.codec_context.name, audio_rate=audio.rate,
                     audio_channels=audio.channels, audio_seconds=samples / audio.rate)
