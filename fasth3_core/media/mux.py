"""One movie file being written: frames and sound into a container, kept in step."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter

from ..errors import FastH3Error, GeometryError
from ..packing.geometry import FPS
from .formats import Output
from .sound import Sound

_BT709 = 1
"""Code of BT.709 for primaries, transfer and matrix alike (H.273)."""
_RGB_MATRIX = 0
_NUMPY_FORMATS = {8: "rgb24", 16: "rgb48le"}
_SAMPLES = {"aac": "fltp", "flac": "s32"}
"""How each sound encoder takes samples; FLAC stores 24 bits of the 32."""
_MUXER_OPTIONS = {
    "mp4": {
        # use_metadata_tags keeps keys such as "workflow"; faststart puts the index first, so browsers start at once
        "movflags": "use_metadata_tags+faststart",
        # whole frames at 24 fps and whole samples at 32 kHz; the default of 1000 would round the sound's length
        "movie_timescale": "96000",
    },
    "matroska": {},
}


class Movie:
    """A context manager: write() chunks of frames, close() when the last has been written.

    Args:
        sound: of the whole clip, exactly as long as it; None for no track.
        metadata: values are stored as JSON under their key, where ComfyUI looks for the workflow.

    Raises:
        GeometryError: a size that the format does not hold, frames of another size, or none at all.
        FastH3Error: this build of PyAV lacks an encoder, or the encoder refuses the size.
    """

    def __init__(
        self, path: str | os.PathLike, output: Output, width: int, height: int,
        sound: Sound | None = None, metadata: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        output.check_size(width, height)
        self.output, self.size = output, (height, width)
        self.frames = self.samples = 0
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="fasth3-convert")
        self._reformatter = VideoReformatter()  # one for all frames: its tables are made once
        self.sound = None if output.audio_codec == "none" else sound
        self.container = av.open(
            str(path), "w", format=output.form.muxer, options=dict(_MUXER_OPTIONS[output.form.muxer])
        )
        try:
            for key, value in (metadata or {}).items():
                self.container.metadata[key] = json.dumps(value)
            self.video_stream = self._add_video(width, height)
            self.audio_stream = self._add_audio()
        except BaseException:
            self.container.close()
            raise

    def __enter__(self) -> "Movie":
        return self

    def __exit__(self, failure, *_) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        try:
            self.container.close()
        except Exception:  # on a full disk an interruption would become an error
            if failure is None:
                raise

    def write(self, frames_FHWC: torch.Tensor) -> None:
        """Encode frames [n, H, W, 3] of `output.sample_bits` bits, and the sound that goes with them."""
        if frames_FHWC.ndim != 4 or tuple(frames_FHWC.shape[1:]) != (*self.size, 3):
            height, width = self.size
            raise GeometryError(
                f"frames of shape {list(frames_FHWC.shape)} at frame {self.frames}, expected [n, {height}, {width}, 3]."
            )
        for frame in self._ahead.map(self._converted, frames_FHWC.numpy()):
            self._encode_frame(frame)
        self._encode_sound_until(self._samples_of(self.frames))

    def encode_all_sound(self) -> None:
        """The rest of the sound, whatever frames there are."""
        if self.sound is not None:
            self._encode_sound_until(self.sound.wave_CL.shape[1])

    def close(self) -> int:
        """Finish the file; returns the number of frames."""
        if not self.frames:
            raise GeometryError("there are no frames to write.")
        self.container.mux(self.video_stream.encode(None))
        if self.audio_stream is not None:
            self.container.mux(self.audio_stream.encode(None))
        self.container.close()
        return self.frames

    def _add_video(self, width: int, height: int):
        form = self.output.form
        options = dict(form.options) | ({} if form.crf is None else {"crf": str(self.output.crf)})
        stream = _stream(self.container, form.encoder, rate=Fraction(FPS), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, self.output.pixels
        context = stream.codec_context
        context.thread_type = "AUTO"  # several frames at once: PyAV's own choice is slices, slower and larger in x264
        context.color_primaries = context.color_trc = _BT709
        context.colorspace = _RGB_MATRIX if form.rgb else _BT709
        context.color_range = ColorRange.JPEG if form.rgb else ColorRange.MPEG
        if form.tag:
            context.codec_tag = form.tag
        try:
            context.open(strict=False)
        except av.error.FFmpegError as error:
            raise FastH3Error(
                f"{form.name}: {form.encoder} does not take {width}x{height} in {self.output.pixels} ({error}). H.264 "
                "and AV1 go up to 16384 a side: make the picture smaller, or choose 'mkv lossless' or 'png frames'."
            ) from error
        return stream

    def _add_audio(self):
        if self.sound is None:
            return None
        codec = self.output.audio_codec
        stream = _stream(self.container, codec, rate=self.sound.rate, layout=self.sound.layout)
        stream.codec_context.format = _SAMPLES[codec]
        return stream

    def _converted(self, rgb_HWC: np.ndarray) -> av.VideoFrame:
        """In the encoder's pixels. Runs in one thread beside the encoder's many, while frames before are encoded."""
        frame = av.VideoFrame.from_ndarray(rgb_HWC, format=_NUMPY_FORMATS[self.output.sample_bits])
        space = None if self.output.form.rgb else Colorspace.ITU709
        levels = None if self.output.form.rgb else ColorRange.MPEG
        return self._reformatter.reformat(
            frame, format=self.output.pixels, dst_colorspace=space, dst_color_range=levels, threads=1
        )

    def _encode_frame(self, frame: av.VideoFrame) -> None:
        frame.pts, frame.time_base = self.frames, Fraction(1, FPS)
        self.container.mux(self.video_stream.encode(frame))
        self.frames += 1

    def _samples_of(self, frames: int) -> int:
        return 0 if self.sound is None else round(frames * self.sound.rate / FPS)

    def _encode_sound_until(self, stop: int) -> None:
        if self.audio_stream is None or stop == self.samples:
            return
        frame = self.sound.frame(self.samples, stop, _SAMPLES[self.output.audio_codec])
        self.container.mux(self.audio_stream.encode(frame))
        self.samples = stop


def _stream(container, encoder: str, **settings):
    try:
        return container.add_stream(encoder, **settings)
    except av.codec.codec.UnknownCodecError as error:
        raise FastH3Error(
            f"this PyAV ({av.__version__}) has no encoder {error}: reinstall it from its wheel (pip install -U av), "
            "or choose another format."
        ) from error
