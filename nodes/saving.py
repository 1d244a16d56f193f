"""Save: frames and sound to an MP4 in the output folder, with the workflow and the report inside."""

from collections.abc import Iterator

import torch

from ..fasth3_core.errors import ContractError, GeometryError
from ..fasth3_core.media.mux import write_mp4
from ..fasth3_core.packing.geometry import FPS
from . import _host
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
    def execute(cls, images, filename_prefix, audio=None, report=None) -> io.NodeOutput:
        host = _host.get()
        if images.ndim != 4 or images.shape[-1] < 3:
            raise GeometryError(f"images have the shape {list(images.shape)}, expected [frames, height, width, 3].")
        frames, height, width = images.shape[:3]
        waveform, sample_rate = _first_track(audio)
        file = host.output_file(filename_prefix, ".mp4", width, height)
        metadata = {}
        if host.wants_metadata():
            metadata |= cls.hidden.extra_pnginfo or {}
            metadata |= {"prompt": cls.hidden.prompt} if cls.hidden.prompt else {}
            metadata |= {"fasth3_report": report.to_dict()} if report is not None else {}
        write_mp4(file.path, _chunks(host, images), audio=waveform, sample_rate=sample_rate, metadata=metadata)
        lines = [f"{file.filename}: {width}x{height}, {frames} frames ({frames / FPS:.2f} s)"]
        lines += [report.to_text()] if report is not None else []
        return io.NodeOutput(ui=tell(
            cls, "\n".join(lines), logged=lines[0], images=[file.as_ui()], animated=(True,)
        ))


def _first_track(audio) -> tuple[torch.Tensor | None, int]:
    """AUDIO -> ([1 or 2, samples], rate), or (None, a rate that nothing reads)."""
    if audio is None:
        return None, 1
    waveform = audio["waveform"]
    if waveform.ndim != 3 or waveform.shape[0] != 1:
        raise ContractError(f"audio has the shape {list(waveform.shape)}, expected one clip [1, channels, samples].")
    return waveform[0], int(audio["sample_rate"])


def _chunks(host: _host.Host, images: torch.Tensor) -> Iterator[torch.Tensor]:
    show = host.progress(len(images))
    for start in range(0, len(images), _CHUNK):
        host.check_interrupt()
        chunk = images[start : start + _CHUNK, ..., :3]
        yield chunk
        show(start + len(chunk), None)
