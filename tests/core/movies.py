"""What tests of written videos share: frames and sound to write, and a reader of what a player sees and hears."""

import av
import torch
from comfyui_fasth3.fasth3_core.media import delivery, formats, sound

RATE = 32000
H264 = formats.Output()


def ramp(frames, height=64, width=96):
    """A horizontal grey ramp that brightens from frame to frame, so frames can be told apart."""
    columns = torch.linspace(0, 0.5, width).expand(height, width)
    return torch.stack([columns + 0.5 * i / frames for i in range(frames)])[..., None].expand(-1, -1, -1, 3)


def tone(seconds, channels=2, frequency=440.0):
    t = torch.arange(round(seconds * RATE)) / RATE
    return 0.5 * torch.sin(2 * torch.pi * frequency * t).expand(channels, -1)


def write(path, chunks, *, audio=None, rate=RATE, output=H264, metadata=None, frames=None, **rest):
    """Deliver chunks with their sound; `frames` is needed where chunks are not a list."""
    frames = frames or sum(len(chunk) for chunk in chunks)
    height, width = (64, 96) if not isinstance(chunks, list) or not chunks else chunks[0].shape[1:3]
    track = None if audio is None else sound.fit(audio, rate, frames)
    with delivery.delivering(path, output, width, height, sound=track, metadata=metadata, **rest) as put:
        for chunk in chunks:
            put(chunk)


def decode(path, pixels="rgb24"):
    with av.open(str(path)) as container:
        metadata = dict(container.metadata)
        context = container.streams.video[0].codec_context
        frames = [frame.to_ndarray(format=pixels) for frame in container.decode(video=0)]
        info = dict(
            codec=context.name, pix_fmt=context.pix_fmt, rate=container.streams.video[0].average_rate,
            colors=(context.color_primaries, context.color_trc, context.colorspace, context.color_range),
        )
    with av.open(str(path)) as container:
        heard = [frame for frame in container.decode(audio=0)] if container.streams.audio else []
        stream = container.streams.audio[0] if heard else None
        seconds = stream.duration * stream.time_base if heard and stream.duration else None
        wave = torch.cat([torch.from_numpy(f.to_ndarray()) for f in heard], dim=-1) if heard else None
        codec = stream.codec_context.name if heard else None
    return frames, info, metadata, codec, seconds, wave
