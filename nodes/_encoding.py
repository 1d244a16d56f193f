"""Pictures and sounds to the latents of conditions, with what encodes them alone on the device."""

from collections.abc import Callable, Sequence

import torch

from ..fasth3_core.errors import CheckpointError
from . import _host
from ._vae_pair import VaePair

POSTERIORS = ("sample", "mean")
POSTERIOR_TEXT = (
    "'sample' draws the latent with seed 42 and rounds it to fp16, as FastVideo does; 'mean' is what ComfyUI's nodes "
    "take."
)
BACKGROUNDS = {"drop": None, "white": 1.0, "black": 0.0}
BACKGROUND_TEXT = "What is behind transparent pixels. 'drop' keeps their hidden colours, as ComfyUI's nodes do."


def check_encoders(vae: VaePair, pictures: bool, sounds: bool) -> None:
    """Raise CheckpointError if the files lack an encoder that is needed."""
    if pictures and vae.encoder is None:
        raise CheckpointError(
            "the video VAE of FastH3 Load VAE holds a decoder only. Pictures and videos as conditions need a file with "
            "`encoder.*` tensors."
        )
    if sounds and vae.sound_encoder is None:
        raise CheckpointError(
            "the audio VAE of FastH3 Load VAE holds a decoder only. Sounds as references need a file with `encoder.*` "
            "tensors."
        )


def encode_pictures(vae: VaePair, clips: Sequence[Callable[[], torch.Tensor]], posterior: str) -> list[torch.Tensor]:
    """Normalised latents [1, 24, t, h, w] on the CPU of clips [1, 3, F, H, W], each made when it is encoded."""
    if not clips:
        return []
    host, encoder = _host.get(), vae.encoder
    host.acquire(encoder, host.device(), encoder.working_bytes())
    latents = []
    with torch.inference_mode():
        for make in clips:
            pixels, show = make(), None

            def moved(done: int, total: int) -> None:
                nonlocal show
                show = show or host.progress(total)
                show(done, None)

            watched = {"on_chunk": moved, "check_interrupt": host.check_interrupt}
            if posterior == "sample":
                latents.append(encoder.vae.condition_latent(pixels, **watched))
            else:
                latents.append(encoder.vae.normalise(encoder.vae.encode(pixels, **watched)))
    return [latent.clone() for latent in latents]


def encode_sounds(vae: VaePair, waves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Normalised latents [1, 32, 2, a] on the CPU of sounds [2, 1, L] at 32 kHz: the posterior's mean, always."""
    if not waves:
        return []
    host, encoder = _host.get(), vae.sound_encoder
    host.acquire(encoder, host.device(), encoder.working_bytes())
    latents = []
    with torch.inference_mode():
        for wave in waves:
            host.check_interrupt()
            latents.append(encoder.vae.normalise(encoder.vae.encode(wave)).transpose(0, 1)[None].cpu())
    return [latent.clone() for latent in latents]
