"""Latents and prompts: the empty latent of a request, and encoded prompts to and from files."""

from pathlib import Path

from ..fasth3_core.media.latent_file import SUFFIX
from ..fasth3_core.packing.geometry import FPS, TRAINED_FRAMES, audio_latents, latent_frames, snap_frames
from . import _claim, _conditioning, _folder_files, _graph, _host, _latents, _output_name, _prompt_file
from ._canvas import ASPECTS, CUSTOM, choose_canvas
from ._host import io
from ._paths import fingerprint
from ._types import CATEGORY
from ._ui import tell


class FastH3EmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3EmptyLatent",
            display_name="FastH3 Empty Latent",
            category=CATEGORY,
            description="Size and length of the video. The only FastH3 node that changes what you ask for: sides to "
            "multiples of 32 pixels, length up to 17k + 5 frames at 24 fps. It shows what it made of the request.",
            inputs=[
                io.Int.Input("width", default=1344, min=32, max=4096, step=32,
                             tooltip="Pixels, to the nearest multiple of 32. Read when aspect is 'custom'."),
                io.Int.Input("height", default=768, min=32, max=4096, step=32,
                             tooltip="Pixels, to the nearest multiple of 32. Read when aspect is 'custom'."),
                io.Float.Input("seconds", default=5.0, min=0.1, max=60.0, step=0.1,
                               tooltip="Length, up to the next 17k + 5 frames: 5 s is 124 frames, 10 s 243, 15 s 362, "
                               "which is the trained range. Others run with a warning."),
                io.Combo.Input("aspect", options=[CUSTOM, *ASPECTS], default=CUSTOM, optional=True,
                               tooltip="'custom' takes width and height; any other replaces them."),
                io.Float.Input("megapixels", default=0.0, min=0.0, max=4.0, step=0.05, optional=True,
                               tooltip="Area in millions of pixels when aspect is not 'custom'. 0 is the model's own "
                               "canvas: 768 pixels on the short side, at most 768 x 1344."),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="Video and audio, as MiniMax H3 nodes make it."),
                io.Int.Output(display_name="frames"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, width, height, seconds, aspect=CUSTOM, megapixels=0.0) -> io.NodeOutput:
        canvas_width, canvas_height = choose_canvas(aspect, megapixels, width, height)
        frames = snap_frames(seconds)
        text = _describe(width, height, seconds, aspect, canvas_width, canvas_height, frames)
        video, audio = _latents.empty(latent_frames(frames), canvas_height, canvas_width, audio_latents(frames))
        return io.NodeOutput(_latents.join(video, audio), frames, ui=tell(cls, text))


def _describe(width, height, seconds, aspect, canvas_width, canvas_height, frames) -> str:
    asked = "" if aspect != CUSTOM or (width, height) == (canvas_width, canvas_height) else f"{width}x{height} -> "
    text = f"{asked}{canvas_width}x{canvas_height}, {seconds:g} s -> {frames} frames ({frames / FPS:.2f} s)"
    shortest, longest = TRAINED_FRAMES
    if not shortest <= frames <= longest:
        text += f"; trained on {shortest} to {longest} frames, quality outside is unknown"
    return text


class FastH3SavePromptEmbeds(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3SavePromptEmbeds",
            display_name="FastH3 Save Prompt Embeds",
            category=CATEGORY,
            description="Saves an encoded prompt, with its keyframes and references, to the output folder. FastH3 Load "
            "Prompt Embeds then needs no text encoder.",
            inputs=[
                io.Conditioning.Input("positive", tooltip="From ComfyUI's text encode or MiniMax H3 nodes."),
                io.String.Input("filename_prefix", default="fasth3_prompts/prompt",
                                tooltip="In the output folder; may name a subfolder."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix=None):
        return _output_name.problem(filename_prefix)

    @classmethod
    def execute(cls, positive, filename_prefix) -> io.NodeOutput:
        host = _host.get()
        prompt = _conditioning.read(positive)
        _output_name.check(filename_prefix)
        facts = _graph.prompt_facts(cls.hidden.prompt, cls.hidden.unique_id, host.model_roots("text_encoders"))
        with _claim.output_file(filename_prefix, ".safetensors") as file:
            _prompt_file.save(file.path, prompt, facts)
        parts = {"tokens": prompt.text_states.shape[1], "keyframes": len(prompt.keyframes)}
        if prompt.references:
            parts["references"] = len(prompt.references)
        text = f"{file.filename}: {', '.join(f'{count} {what}' for what, count in parts.items())}"
        return io.NodeOutput(ui=tell(cls, text, prompts=[file.as_ui()]))


class FastH3LoadPromptEmbeds(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3LoadPromptEmbeds",
            display_name="FastH3 Load Prompt Embeds",
            category=CATEGORY,
            description="An encoded prompt from a file of FastH3 Save Prompt Embeds.",
            inputs=[
                io.Combo.Input("file", options=_prompt_files(),
                               tooltip="A .safetensors file of the input folder, or of the output folder [output]."),
            ],
            outputs=[io.Conditioning.Output(display_name="positive")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, file):
        return fingerprint(_prompt_path(file))

    @classmethod
    def execute(cls, file) -> io.NodeOutput:
        prompt, metadata = _prompt_file.load(_prompt_path(file))
        return io.NodeOutput(_conditioning.write(prompt), ui=tell(cls, metadata.get("prompt") or "no text stored"))


def _prompt_files() -> list[str]:
    return [name for name in _folder_files.names(".safetensors") if SUFFIX not in name]


def _prompt_path(name: str) -> Path:
    return _folder_files.resolve(name, "Save a prompt with FastH3 Save Prompt Embeds first.")
