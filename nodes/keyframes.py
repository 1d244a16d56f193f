"""Keyframes: first and last picture of a video as conditions, without the text encoder."""

import torch

from ..fasth3_core.errors import CheckpointError, ConfigError
from ..fasth3_core.media.images import cover_crop, stretch, to_image, to_tensor
from ..fasth3_core.packing.geometry import LATENT_PIXELS, frames_of_latents
from . import _conditioning, _host, _latents
from ._host import io
from ._types import CATEGORY, Vae
from ._ui import tell

_FITS = {"cover": cover_crop, "stretch": stretch}
_BACKGROUNDS = {"drop": None, "white": 1.0, "black": 0.0}
_POSTERIORS = ("sample", "mean")


class FastH3Keyframes(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3Keyframes",
            display_name="FastH3 Keyframes",
            category=CATEGORY,
            description="Adds a first and a last picture to an encoded prompt. Needs the video VAE and no text "
            "encoder: the prompt may come from a file. FastH3 Sampler and ComfyUI's own sampler both take the result. "
            "Students but Omni were distilled for text alone, and the report says so.",
            inputs=[
                io.Conditioning.Input("positive", tooltip="From a text encoder, or FastH3 Load Prompt Embeds."),
                Vae.Input("vae", tooltip="From FastH3 Load VAE, with an encoder in its video VAE."),
                io.Latent.Input("latent", tooltip="The empty latent of the video: says its size and its last frame."),
                io.Image.Input("first_frame", optional=True, tooltip="The first picture of the batch is used."),
                io.Image.Input("last_frame", optional=True, tooltip="The first picture of the batch is used."),
                io.Combo.Input("fit", options=list(_FITS), default="cover", optional=True,
                               tooltip="'cover' keeps the aspect and cuts what is over; 'stretch' cuts nothing."),
                io.Combo.Input("alpha", options=list(_BACKGROUNDS), default="drop", optional=True,
                               tooltip="What is behind transparent pixels. 'drop' keeps their hidden colours, as "
                               "ComfyUI's nodes do."),
                io.Combo.Input("posterior", options=list(_POSTERIORS), default="sample", optional=True,
                               tooltip="'sample' draws the latent with seed 42 and rounds it to fp16, as FastVideo "
                               "does; 'mean' is what ComfyUI's nodes take."),
            ],
            outputs=[io.Conditioning.Output(display_name="positive")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, positive, vae, latent, first_frame=None, last_frame=None, fit="cover", alpha="drop", posterior="sample"
    ) -> io.NodeOutput:
        video, _ = _latents.split(latent)
        frames = frames_of_latents(video.shape[2])
        pictures = {0: first_frame, frames - 1: last_frame}
        pictures = {frame: image for frame, image in pictures.items() if image is not None}
        if not pictures:
            return io.NodeOutput(positive, ui=tell(cls, "no picture connected: the prompt is passed on"))
        height, width = (side * LATENT_PIXELS for side in video.shape[3:])
        canvas = {
            frame: _on_canvas(image, height, width, fit, alpha, f"frame {frame}") for frame, image in pictures.items()
        }
        made = _encode(vae, canvas, posterior)
        text = ", ".join(f"frame {frame}: {_told(pictures[frame], height, width, fit)}" for frame in made)
        return io.NodeOutput(_conditioning.with_keyframes(positive, made), ui=tell(cls, text))


def _on_canvas(image: torch.Tensor, height: int, width: int, fit: str, alpha: str, where: str) -> torch.Tensor:
    """The first picture of IMAGE [B, H, W, C] as [1, 3, 1, height, width] in [0, 1]."""
    if image.ndim != 4 or image.shape[-1] not in (3, 4) or not all(image.shape):
        shape = f"an IMAGE of shape {list(image.shape)}"
        raise ConfigError(where, shape, "[1, height, width, 3 or 4]", "Load a picture.")
    pixels = image[0].float().cpu()
    background = _BACKGROUNDS[alpha]
    if pixels.shape[-1] == 4:
        opacity = 1.0 if background is None else pixels[..., 3:].clamp(0, 1)
        pixels = pixels[..., :3] * opacity + (background or 0.0) * (1 - opacity)
    fitted = to_tensor(_FITS[fit](to_image(pixels), height, width))
    return fitted.permute(2, 0, 1)[None, :, None]


def _encode(vae, canvas: dict[int, torch.Tensor], posterior: str) -> dict[int, torch.Tensor]:
    """Normalised latents [1, 24, 1, h, w] by frame, on the CPU."""
    host = _host.get()
    if vae.encoder is None:
        raise CheckpointError(
            "the video VAE of FastH3 Load VAE holds a decoder only. Keyframes need a file with `encoder.*` tensors."
        )
    host.acquire(vae.encoder, host.device(), vae.encoder.working_bytes())
    encoder, made = vae.encoder.video, {}
    with torch.inference_mode():
        for frame, pixels in canvas.items():
            host.check_interrupt()
            if posterior == "sample":
                made[frame] = encoder.keyframe_latent(pixels)
            else:
                made[frame] = encoder.normalise(encoder.encode(pixels))
    return {frame: latent.clone() for frame, latent in made.items()}


def _told(image: torch.Tensor, height: int, width: int, fit: str) -> str:
    return f"{image.shape[2]}x{image.shape[1]} -> {width}x{height} ({fit})"
