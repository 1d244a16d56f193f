"""References: pictures, videos and sounds for a video to resemble, with the text encoder or without."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..fasth3_core.media.reference_pixels import encoded, seen
from ..fasth3_core.media.references import MOST, SIZES, check_counts
from ..fasth3_core.packing.geometry import LATENT_PIXELS, frames_of_latents
from ..fasth3_core.packing.layout import Reference
from . import _conditioning, _latents, _presentation
from ._encoding import (
    BACKGROUND_TEXT,
    BACKGROUNDS,
    POSTERIOR_TEXT,
    POSTERIORS,
    check_encoders,
    encode_pictures,
    encode_sounds,
)
from ._host import io
from ._reference_inputs import Rules, Wanted
from ._types import CATEGORY, Vae
from ._ui import tell
from ._vae_pair import VaePair


class FastH3References(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3References",
            display_name="FastH3 References",
            category=CATEGORY,
            description="Pictures, videos and sounds that the video is to resemble. With clip it encodes the prompt as "
            "in training: the text encoder sees the pictures. With positive it adds them to an encoded prompt, for "
            "which no text encoder is needed. Pictures come first, then videos, then sounds. FastH3 Omni and the base "
            "model were trained with references; reference videos run on the base alone.",
            inputs=[
                Vae.Input("vae", tooltip="From FastH3 Load VAE, with encoders in both VAEs."),
                io.Latent.Input("latent", tooltip="The empty latent of the video: references are no longer than it."),
                io.Conditioning.Input("positive", optional=True, tooltip=_presentation.POSITIVE_TEXT),
                io.Clip.Input("clip", optional=True, tooltip=_presentation.CLIP_TEXT),
                _grow("images", io.Image, MOST["picture"], "Every picture of a batch is a reference of its own."),
                _grow("videos", io.Video, MOST["video"], "From Load Video or Create Video, at any frame rate."),
                _grow("audios", io.Audio, MOST["sound"], "Sounds by themselves. Soundtracks come with their videos."),
                io.String.Input("prompt", default="", multiline=True, dynamic_prompts=True, optional=True,
                                tooltip="Read with clip. It may name <Picture 1>, <Video 1> and <Audio 1>, each kind "
                                "counted for itself, the soundtrack of a video among the sounds."),
                io.Combo.Input("size", options=list(SIZES), default=SIZES[0], optional=True,
                               tooltip="'trained': pictures with a short side of 2048 pixels, videos at 768p. 'not "
                               "enlarged': the same, or smaller. 'as the video': pictures of no larger area than the "
                               "video, which makes steps faster."),
                io.Combo.Input("alpha", options=list(BACKGROUNDS), default="drop", optional=True,
                               tooltip=BACKGROUND_TEXT),
                io.Combo.Input("posterior", options=list(POSTERIORS), default="sample", optional=True,
                               tooltip=POSTERIOR_TEXT),
                io.Combo.Input("video_sound", options=["use", "drop"], default="use", optional=True,
                               tooltip="Whether the soundtracks of the videos are references, too."),
            ],
            outputs=[io.Conditioning.Output(display_name="positive")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, vae, latent, positive=None, clip=None, images=None, videos=None, audios=None, prompt="",
        size=SIZES[0], alpha="drop", posterior="sample", video_sound="use",
    ) -> io.NodeOutput:
        _presentation.check_source(positive, clip, prompt)
        video, _ = _latents.split(latent)
        frames, (height, width) = frames_of_latents(video.shape[2]), (side * LATENT_PIXELS for side in video.shape[3:])
        rules = Rules(frames, height, width, size, BACKGROUNDS[alpha], video_sound == "use")
        wanted = rules.wanted(images, videos, audios)
        present = [] if positive is None else _conditioning.reference_kinds(positive)
        check_counts(_counts([*present, *(each.kind for each in wanted)]))
        made, shown = _encode(vae, wanted, posterior)
        if clip is not None:
            positive = _presentation.with_references(clip, prompt, wanted, shown)
        lines = [f"{each.told}: {reference.num_tokens} tokens" for each, reference in zip(wanted, made, strict=True)]
        ui = tell(cls, "\n".join(lines) or "no references connected")
        return io.NodeOutput(_conditioning.with_references(positive, made) if made else positive, ui=ui)


def _grow(name: str, kind: Any, most: int, tooltip: str) -> io.Autogrow.Input:
    one = name.removesuffix("s")
    template = io.Autogrow.TemplatePrefix(kind.Input(one, tooltip=tooltip), prefix=f"{one}_", min=0, max=most)
    return io.Autogrow.Input(name, template=template, optional=True, tooltip=tooltip)


def _encode(
    vae: VaePair, wanted: Sequence[Wanted], posterior: str
) -> tuple[list[Reference], list[torch.Tensor | None]]:
    """The references, and what a text encoder sees of each: bytes [n, H, W, 3], or None of a sound."""
    pictures = [i for i, each in enumerate(wanted) if each.clip is not None]
    sounds = [i for i, each in enumerate(wanted) if each.wave is not None]
    check_encoders(vae, bool(pictures), bool(sounds))
    shown: list[torch.Tensor | None] = [None] * len(wanted)

    def pixels(index: int) -> torch.Tensor:
        clip = wanted[index].clip()
        shown[index] = seen(clip).clone()  # the rest is not kept
        return encoded(clip)

    latents = dict(zip(pictures, encode_pictures(vae, [partial(pixels, i) for i in pictures], posterior), strict=True))
    audio = dict(zip(sounds, encode_sounds(vae, [wanted[i].wave for i in sounds]), strict=True))
    return [Reference(each.kind, latents.get(i), audio.get(i)) for i, each in enumerate(wanted)], shown


def _counts(kinds: Sequence[str]) -> dict[str, int]:
    of = {"picture": ("image",), "video": ("video", "video_audio"), "sound": ("audio",)}
    return {name: sum(kind in members for kind in kinds) for name, members in of.items()}
