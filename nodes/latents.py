"""Sampled latents to and from files, so that decoding can be done later, again, or on another machine."""

from ..fasth3_core.media import latent_file
from ..fasth3_core.packing.geometry import LATENT_PIXELS, frames_of_latents
from . import _claim, _folder_files, _latents, _output_name
from ._host import io
from ._paths import fingerprint
from ._types import CATEGORY, Report
from ._ui import tell

_HINT = "Save a latent with FastH3 Save Latent first."


class FastH3SaveLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3SaveLatent",
            display_name="FastH3 Save Latent",
            category=CATEGORY,
            description="Saves a sampled latent, video and audio bit for bit, to the output folder, with the report of "
            "its run. FastH3 Load Latent reads it.",
            inputs=[
                io.Latent.Input("latent", tooltip="Of FastH3 Sampler, or of ComfyUI's sampler with MiniMax H3."),
                io.String.Input(
                    "filename_prefix", default="latents/FastH3", tooltip="In the output folder; may name a subfolder.",
                ),
                Report.Input("report", optional=True, tooltip="Of FastH3 Sampler: stored in the file."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix=None):
        return _output_name.problem(filename_prefix)

    @classmethod
    def execute(cls, latent, filename_prefix, report=None) -> io.NodeOutput:
        video, audio = _latents.split(latent)
        _output_name.check(filename_prefix)
        with _claim.output_file(filename_prefix, latent_file.SUFFIX) as file:
            latent_file.save(file.path, video, audio, report)
        return io.NodeOutput(ui=tell(cls, f"{file.filename}: {_describe(video)}", latents=[file.as_ui()]))


class FastH3LoadLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3LoadLatent",
            display_name="FastH3 Load Latent",
            category=CATEGORY,
            description="A latent of FastH3 Save Latent, or one that a failed decode has kept.",
            inputs=[
                io.Combo.Input(
                    "file", options=_folder_files.names(latent_file.SUFFIX),
                    tooltip="A .latent.safetensors file of the input folder, or of the output folder [output].",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="As it was sampled."),
                Report.Output(display_name="report", tooltip="Of the run that made it, if it was saved with one."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, file):
        return fingerprint(_folder_files.resolve(file, _HINT))

    @classmethod
    def execute(cls, file) -> io.NodeOutput:
        video, audio, report = latent_file.load(_folder_files.resolve(file, _HINT))
        latent = _latents.join(video, audio)
        _latents.split(latent)  # refuses streams that do not belong together
        text = _describe(video) + ("" if report is None else f"\n{report.to_text()}")
        return io.NodeOutput(latent, report, ui=tell(cls, text))


def _describe(video) -> str:
    height, width = (side * LATENT_PIXELS for side in video.shape[3:])
    return f"{width}x{height}, {frames_of_latents(video.shape[2])} frames"
