"""Keyframes: first and last picture of a video as conditions, with the text encoder or without."""

import torch

from ..fasth3_core.media.images import cover_crop, opaque, stretch, to_image
from ..fasth3_core.media.reference_pixels import check_image, seen, to_clip
from ..fasth3_core.packing.geometry import LATENT_PIXELS, frames_of_latents
from . import _conditioning, _latents, _presentation
from ._encoding import BACKGROUND_TEXT, BACKGROUNDS, POSTERIOR_TEXT, POSTERIORS, check_encoders, encode_pictures
from ._host import io
from ._types import CATEGORY, Vae
from ._ui import tell

_FITS = {"cover": cover_crop, "stretch": stretch}


class FastH3Keyframes(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3Keyframes",
            display_name="FastH3 Keyframes",
            category=CATEGORY,
            description="A first and a last picture of the video. With positive it adds them to an encoded prompt, for "
            "which no text encoder is needed. With clip it encodes the prompt as in training: the text encoder sees "
            "the pictures. FastH3 Sampler and ComfyUI's own sampler both take the result. Students were distilled for "
            "text alone, and the report says so.",
            inputs=[
                io.Conditioning.Input("positive", optional=True, tooltip=_presentation.POSITIVE_TEXT),
                Vae.Input("vae", tooltip="From FastH3 Load VAE, with an encoder in its video VAE."),
                io.Latent.Input("latent", tooltip="The empty latent of the video: says its size and its last frame."),
                io.Image.Input("first_frame", optional=True, tooltip="The first picture of the batch is used."),
                io.Image.Input("last_frame", optional=True, tooltip="The first picture of the batch is used."),
                io.Combo.Input("fit", options=list(_FITS), default="cover", optional=True,
                               tooltip="'cover' keeps the aspect and cuts what is over; 'stretch' cuts nothing."),
                io.Combo.Input("alpha", options=list(BACKGROUNDS), default="drop", optional=True,
                               tooltip=BACKGROUND_TEXT),
                io.Combo.Input("posterior", options=list(POSTERIORS), default="sample", optional=True,
                               tooltip=POSTERIOR_TEXT),
                io.Clip.Input("clip", optional=True, tooltip=_presentation.CLIP_TEXT),
                io.String.Input("prompt", default="", multiline=True, dynamic_prompts=True, optional=True,
                                tooltip="Read with clip."),
            ],
            outputs=[io.Conditioning.Output(display_name="positive")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, vae, latent, positive=None, first_frame=None, last_frame=None, fit="cover", alpha="drop",
        posterior="sample", clip=None, prompt="",
    ) -> io.NodeOutput:
        _presentation.check_source(positive, clip, prompt)
        video, _ = _latents.split(latent)
        frames = frames_of_latents(video.shape[2])
        pictures = {0: first_frame, frames - 1: last_frame}
        pictures = {frame: image for frame, image in pictures.items() if image is not None}
        height, width = (side * LATENT_PIXELS for side in video.shape[3:])
        if positive is not None:
            _conditioning.check_free(positive, pictures)
        for frame, image in pictures.items():
            check_image(image, f"frame {frame}")
        check_encoders(vae, pictures=bool(pictures), sounds=False)
        canvas = [_on_canvas(image[0], height, width, fit, alpha) for image in pictures.values()]
        made = dict(zip(pictures, encode_pictures(vae, [lambda c=c: c for c in canvas], posterior), strict=True))
        if clip is not None:
            positive = _presentation.with_keyframes(clip, prompt, [seen(pixels) for pixels in canvas])
        text = ", ".join(f"frame {frame}: {_told(pictures[frame], height, width, fit)}" for frame in made)
        ui = tell(cls, text or "no picture connected")
        return io.NodeOutput(_conditioning.with_keyframes(positive, made) if made else positive, ui=ui)


def _on_canvas(image_HWC: torch.Tensor, height: int, width: int, fit: str, alpha: str) -> torch.Tensor:
    """A picture [H, W, 3 or 4] as bytes [1, 3, 1, height, width]."""
    picture = to_image(opaque(image_HWC.float().cpu(), BACKGROUNDS[alpha]))
    return to_clip(_FITS[fit](picture, height, width))


def _told(image: torch.Tensor, height: int, width: int, fit: str) -> str:
    return f"{image.shape[2]}x{image.shape[1]} -> {width}x{height} ({fit})"
