"""References: pictures, videos and sounds for a video to resemble, without the text encoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..fasth3_core.media.film import Film, FramesFilm, open_film
from ..fasth3_core.media.reference_pixels import check_image, film_pixels, picture_pixels
from ..fasth3_core.media.references import MOST, SIZES, check_counts, picture_size, video_size
from ..fasth3_core.media.resample import reference_sound
from ..fasth3_core.packing.geometry import FPS, LATENT_PIXELS, SAMPLE_RATE, frames_of_latents
from ..fasth3_core.packing.layout import Reference
from . import _conditioning, _host, _latents
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
            description="Adds pictures, videos and sounds that the video is to resemble to an encoded prompt. Needs "
            "both VAEs and no text encoder: the prompt may come from a file. Pictures come first, then videos, then "
            "sounds; several of these nodes in a row give another order. FastH3 Omni and the base model were trained "
            "with references; reference videos run on the base alone.",
            inputs=[
                io.Conditioning.Input("positive", tooltip="From a text encoder, or FastH3 Load Prompt Embeds."),
                Vae.Input("vae", tooltip="From FastH3 Load VAE, with encoders in both VAEs."),
                io.Latent.Input("latent", tooltip="The empty latent of the video: references are no longer than it."),
                _grow("images", io.Image, MOST["picture"], "Every picture of a batch is a reference of its own."),
                _grow("videos", io.Video, MOST["video"], "From Load Video or Create Video, at any frame rate."),
                _grow("audios", io.Audio, MOST["sound"], "Sounds by themselves. Soundtracks come with their videos."),
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
        cls, positive, vae, latent, images=None, videos=None, audios=None,
        size=SIZES[0], alpha="drop", posterior="sample", video_sound="use",
    ) -> io.NodeOutput:
        video, _ = _latents.split(latent)
        target = _Target(frames_of_latents(video.shape[2]), *(side * LATENT_PIXELS for side in video.shape[3:]))
        wanted = [
            *(_picture(image, target, size, alpha) for batch in _given(images) for image in _checked(batch)),
            *(_video(each, target, size, video_sound) for each in _given(videos)),
            *(_sound(each, target) for each in _given(audios)),
        ]
        if not wanted:
            return io.NodeOutput(positive, ui=tell(cls, "nothing connected: the prompt is passed on"))
        check_counts(_counts([*_conditioning.reference_kinds(positive), *(each.kind for each in wanted)]))
        made = _encode(vae, wanted, posterior)
        lines = [f"{each.told}: {reference.num_tokens} tokens" for each, reference in zip(wanted, made, strict=True)]
        return io.NodeOutput(_conditioning.with_references(positive, made), ui=tell(cls, "\n".join(lines)))


@dataclass(frozen=True)
class _Target:
    """The video to make."""

    frames: int
    height: int
    width: int


@dataclass(frozen=True)
class _Wanted:
    kind: str
    told: str
    clip: Callable[[], torch.Tensor] | None = None
    """Makes [1, 3, F, H, W]."""
    wave: torch.Tensor | None = None
    """[2, 1, L]"""


def _grow(name: str, kind: Any, most: int, tooltip: str) -> io.Autogrow.Input:
    one = name.removesuffix("s")
    template = io.Autogrow.TemplatePrefix(kind.Input(one, tooltip=tooltip), prefix=f"{one}_", min=0, max=most)
    return io.Autogrow.Input(name, template=template, optional=True, tooltip=tooltip)


def _given(slots: dict[str, Any] | None) -> list[Any]:
    return [value for value in (slots or {}).values() if value is not None]


def _checked(images: torch.Tensor) -> torch.Tensor:
    check_image(images, "images")
    return images


def _picture(image: torch.Tensor, target: _Target, rule: str, alpha: str) -> _Wanted:
    canvas = target.height, target.width
    height, width = picture_size(*image.shape[:2], rule, canvas)
    clip = partial(picture_pixels, image, rule, canvas, BACKGROUNDS[alpha])
    return _Wanted("image", f"picture {image.shape[1]}x{image.shape[0]} -> {width}x{height}", clip)


def _video(video: Any, target: _Target, rule: str, sound: str) -> _Wanted:
    film = _film(video)
    height, width = video_size(film.height, film.width, rule)
    track = film.sound(target.frames / FPS) if sound == "use" else None
    wave = None if track is None else reference_sound(*track, target.frames)
    told = f"video {film.width}x{film.height} -> {width}x{height}"
    clip = partial(film_pixels, film, rule, target.frames, _host.get().check_interrupt)
    if wave is None:
        return _Wanted("video", told, clip)
    return _Wanted("video_audio", f"{told} with {_seconds(wave)} of sound", clip, wave)


def _sound(audio: dict[str, Any], target: _Target) -> _Wanted:
    wave = reference_sound(audio["waveform"], audio["sample_rate"], target.frames)
    return _Wanted("audio", f"sound of {_seconds(wave)}", wave=wave)


def _encode(vae: VaePair, wanted: Sequence[_Wanted], posterior: str) -> list[Reference]:
    clips = [each.clip for each in wanted if each.clip is not None]
    waves = [each.wave for each in wanted if each.wave is not None]
    check_encoders(vae, bool(clips), bool(waves))
    pictures, sounds = iter(encode_pictures(vae, clips, posterior)), iter(encode_sounds(vae, waves))
    return [
        Reference(
            each.kind,
            latent=None if each.clip is None else next(pictures),
            audio_latent=None if each.wave is None else next(sounds),
        )
        for each in wanted
    ]


def _film(video: Any) -> Film:
    if _host.has_file(video):
        return open_film(video.get_stream_source(), *video.get_active_trim_window())
    parts = video.get_components()
    track = None if parts.audio is None else (parts.audio["waveform"], parts.audio["sample_rate"])
    return FramesFilm(parts.images, float(parts.frame_rate), track)


def _seconds(wave: torch.Tensor) -> str:
    return f"{wave.shape[2] / SAMPLE_RATE:.1f} s"


def _counts(kinds: list[str]) -> dict[str, int]:
    of = {"picture": ("image",), "video": ("video", "video_audio"), "sound": ("audio",)}
    return {name: sum(kind in members for kind in kinds) for name, members in of.items()}
