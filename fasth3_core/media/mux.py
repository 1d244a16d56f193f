"""Frames and sound to MP4: H.264 and AAC at 24 fps, written under a temporary name and renamed when complete."""

import json
import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import torch
from av.video.reformatter import ColorRange, Colorspace

from ..atomic import replacing
from ..errors import FastH3Error, GeometryError
from ..packing.geometry import FPS

VIDEO_ENCODER = "libx264"
AUDIO_ENCODER = "aac"
_BT709 = 1
"""Code of BT.709 for primaries, transfer and matrix alike (H.273)."""
_LAYOUTS = {1: "mono", 2: "stereo"}


def to_uint8(frames_FHWC: torch.Tensor) -> torch.Tensor:
    """[F, H, W, 3] in [0, 1] -> uint8 on the CPU, rounded to nearest. Values outside are clamped, NaN becomes 0."""
    return frames_FHWC.float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8).cpu()


def write_mp4(
    path: str | os.PathLike,
    chunks: Iterable[torch.Tensor],
    *,
    audio: torch.Tensor | None = None,
    sample_rate: int = 32000,
    crf: int = 18,
    metadata: Mapping[str, Any] | None = None,
) -> int:
    """Encode chunks of frames, with sound beside them, and return the number of frames.

    Chunks are taken one at a time, so a decoder may still be making them. The sound is cut, or continued with
    silence, to frames / 24 seconds exactly.

    Args:
        path: the finished file. Nothing appears under this name unless all of it was written.
        chunks: [n, H, W, 3] in [0, 1], n >= 1, H and W the same throughout and even.
        audio: [channels, samples] in [-1, 1], one or two channels, or None for a file without sound track. Numbers
            that are not finite become silence: a broken sound track must not cost the picture.
        crf: x264 quality, 0 (lossless) to 51; 18 is visually lossless.
        metadata: values are stored as JSON under their key, where ComfyUI looks for the workflow.

    Raises:
        GeometryError: no frames, odd sizes, or sizes that change.
        FastH3Error: this build of PyAV lacks an encoder.
    """
    with replacing(Path(path)) as partial, _open(partial) as container:
        for key, value in (metadata or {}).items():
            container.metadata[key] = json.dumps(value)
        return _Tracks(container, crf, audio, sample_rate).encode(chunks)


def _open(path: Path):
    options = {
        # use_metadata_tags keeps keys such as "workflow"; faststart puts the index first, so browsers start at once
        "movflags": "use_metadata_tags+faststart",
        # whole frames at 24 fps and whole samples at 32 kHz; the default of 1000 would round the sound's length
        "movie_timescale": "96000",
    }
    return av.open(str(path), "w", format="mp4", options=options)


class _Tracks:
    """The two streams of one file, kept in step."""

    def __init__(self, container, crf: int, audio: torch.Tensor | None, sample_rate: int):
        self.container = container
        self.crf = crf
        self.audio = None if audio is None else audio.detach().float().cpu().nan_to_num(0, 0, 0).clamp(-1, 1)
        self.sample_rate = sample_rate
        self.video_stream = None
        self.audio_stream = None
        self.frames = 0
        self.samples = 0

    def encode(self, chunks: Iterable[torch.Tensor]) -> int:
        for chunk_FHWC in chunks:
            if chunk_FHWC.ndim != 4 or chunk_FHWC.shape[-1] != 3 or 0 in chunk_FHWC.shape:
                raise GeometryError(f"frames must be [n, height, width, 3], got {list(chunk_FHWC.shape)}.")
            height, width = chunk_FHWC.shape[1:3]
            if self.video_stream is None:
                self._add_streams(height, width)
            elif (height, width) != (self.video_stream.height, self.video_stream.width):
                raise GeometryError(
                    f"frame {self.frames} is {width}x{height}, but the video is "
                    f"{self.video_stream.width}x{self.video_stream.height}."
                )
            for rgb in to_uint8(chunk_FHWC):
                self._encode_frame(rgb)
            self._encode_audio_until(round(self.frames * self.sample_rate / FPS))
        if self.video_stream is None:
            raise GeometryError("there are no frames to write.")
        self.container.mux(self.video_stream.encode(None))
        if self.audio_stream is not None:
            self.container.mux(self.audio_stream.encode(None))
        return self.frames

    def _add_streams(self, height: int, width: int) -> None:
        if height % 2 or width % 2:
            raise GeometryError(f"H.264 in 4:2:0 needs an even size, got {width}x{height}. Crop or pad by one pixel.")
        try:
            video = self.container.add_stream(VIDEO_ENCODER, rate=Fraction(FPS), options={"crf": str(self.crf)})
            if self.audio is not None:
                layout = _LAYOUTS.get(self.audio.shape[0])
                if self.audio.ndim != 2 or layout is None:
                    raise GeometryError(f"audio must be [1 or 2, samples], got {list(self.audio.shape)}.")
                self.audio_stream = self.container.add_stream(AUDIO_ENCODER, rate=self.sample_rate, layout=layout)
        except av.codec.codec.UnknownCodecError as error:
            raise FastH3Error(
                f"this PyAV ({av.__version__}) has no encoder {error}: reinstall it from its wheel (pip install -U av)."
            ) from error
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        context = video.codec_context
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = ColorRange.MPEG
        self.video_stream = video

    def _encode_frame(self, rgb_HWC: torch.Tensor) -> None:
        frame = av.VideoFrame.from_ndarray(rgb_HWC.numpy(), format="rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
        frame.pts, frame.time_base = self.frames, Fraction(1, FPS)
        self.container.mux(self.video_stream.encode(frame))
        self.frames += 1

    def _encode_audio_until(self, stop: int) -> None:
        if self.audio_stream is None or stop == self.samples:
            return
        wave_CL = self.audio[:, self.samples : stop]
        wave_CL = torch.nn.functional.pad(wave_CL, (0, stop - self.samples - wave_CL.shape[1]))
        layout = _LAYOUTS[wave_CL.shape[0]]
        frame = av.AudioFrame.from_ndarray(wave_CL.contiguous().numpy(), format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = self.sample_rate, self.samples, Fraction(1, self.sample_rate)
        self.container.mux(self.audio_stream.encode(frame))
        self.samples = stop
