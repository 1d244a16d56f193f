"""Save: frames and sound to an MP4 in the output folder, with the workflow and the report inside."""

from collections.abc import Iterator

import torch

from ..fasth3_core.errors import ContractError, GeometryError
from ..fasth3_core.media.delivery import delivering
from ..fasth3_core.media.formats import Output
from ..fasth3_core.packing.geometry import FPS
from . import _claim, _host, _movie, _output_name
from ._host import io
from ._types import CATEGORY, Report
from ._ui import tell

_CHUNK = 8
"""Frames converted and encoded at a time."""


class FastH3SavePreview(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3SavePreview",
            display_name="FastH3 Save Preview",
            category=CATEGORY,
            description="Saves an MP4 (H.264 and AAC, 24 frames a second) and shows it, with the report of the run.",
            inputs=[
                io.Image.Input("images", tooltip="Frames, 24 a second."),
                io.Audio.Input("audio", optional=True, tooltip="Cut, or filled with silence, to the frames' length."),
                io.String.Input(
                    "filename_prefix", default="video/FastH3",
                    tooltip="In the output folder; may name a subfolder and use %date:yyyy-MM-dd% or %width%.",
                ),
                Report.Input("report", optional=True, tooltip="Of FastH3 Sampler: shown here and stored in the file."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix=None):
        return _output_name.problem(filename_prefix)

    @classmethod
    def execute(cls, images, filename_prefix, audio=None, report=None) -> io.NodeOutput:
        host, output = _host.get(), Output()
        if images.ndim != 4 or images.shape[-1] < 3 or not images.numel():
            raise GeometryError(f"images have the shape {list(images.shape)}, expected [frames, height, width, 3].")
        frames, height, width = images.shape[:3]
        waveform, sample_rate = _first_track(audio)
        _output_name.check(filename_prefix)
        with _claim.output_file(filename_prefix, output.form.suffix, width, height) as file:
            track = _movie.check_sound(file.path, output, width, height, frames, waveform, sample_rate)
            metadata = _movie.metadata(cls, host, report, track, format=output.form.name, crf=output.crf)
            with delivering(file.path, output, width, height, sound=track.sound, metadata=metadata) as put:
                for chunk in _chunks(host, images):
                    put(chunk)
            unkept = track.keep_raw()
        told = "\n".join([
            f"{file.filename}: {width}x{height}, {frames} frames ({frames / FPS:.2f} s)", *_movie.lines(track),
            *unkept,
        ])
        shown = told if report is None else f"{told}\n{report.to_text()}"
        return io.NodeOutput(ui=tell(cls, shown, logged=told, images=[file.as_ui()], animated=(True,)))


def _first_track(audio) -> tuple[torch.Tensor | None, int]:
    """AUDIO -> ([1 or 2, samples], rate), or (None, a rate that nothing reads)."""
    if audio is None:
        return None, 1
    waveform = audio["waveform"]
    if waveform.ndim != 3 or waveform.shape[0] != 1:
        raise ContractError(f"audio has the shape {list(waveform.shape)}, expected one clip [1, channels, samples].")
    rate = int(audio["sample_rate"])
    if rate <= 0:
        raise ContractError(f"audio has {rate} samples a second.")
    return waveform[0], rate


def _chunks(host: _host.Host, images: torch.Tensor) -> Iterator[torch.Tensor]:
    show = host.progress(len(images))
    for start in range(0, len(images), _CHUNK):
        host.check_interrupt()
        chunk = images[start : start + _CHUNK, ..., :3]
        yield chunk
        show(start + len(chunk), None)
