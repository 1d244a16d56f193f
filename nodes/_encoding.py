"""Pictures and sounds to the latents of conditions, with what encodes them alone on the device."""

from collections.abc import Callable, Sequence

import torch

from ..fasth3_core.errors import CheckpointError
from ..fasth3_core.vae.chunks import CLIP_FRAMES
from ..fasth3_core.vae.tiling import TILE
from . import _host
from ._vae_pair import VaePair

POSTERIORS = ("sample", "mean")
POSTERIOR_TEXT = (
    "'sample' draws the latent with seed 42 and rounds it to fp16, as FastVideo does; 'mean' is what ComfyUI's nodes "
    "take."
)
BACKGROUNDS = {"drop": None, "white": 1.0, "black": 0.0}
BACKGROUND_TEXT = "What is behind transparent pixels. 'drop' keeps their hidden colours, as ComfyUI's nodes do."


_FRAME_BYTES = 5 * 128 * TILE * TILE * 4
"""A frame of one tile where the encoder is widest, in fp32: what is added later, normalised, padded and put out, and a
convolution's own. All frames of a clip are encoded at once."""
_SAMPLE_BYTES = 5 * 2 * 64 * 4
"""The same of one sample of both channels."""
_SPARE_BYTES = 512 << 20


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
    host, encoder = _host.get(), vae.encoder
    latents = []
    for make in clips:
        pixels, show = make(), None

        def moved(done: int, total: int) -> None:
            nonlocal show
            show = show or host.progress(total)
            show(done, None)

        watched = {"on_chunk": moved, "check_interrupt": host.check_interrupt}
        host.acquire(encoder, host.device(), min(pixels.shape[2], CLIP_FRAMES) * _FRAME_BYTES + _SPARE_BYTES)
        with torch.inference_mode():
            if posterior == "sample":
                latents.append(encoder.vae.condition_latent(pixels, **watched))
            else:
                latents.append(encoder.vae.normalise(encoder.vae.encode(pixels, **watched)))
    return [latent.clone() for latent in latents]


def encode_sounds(vae: VaePair, waves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Normalised latents [1, 32, 2, a] on the CPU of sounds [2, 1, L] at 32 kHz: the posterior's mean, always."""
    host, encoder = _host.get(), vae.sound_encoder
    latents = []
    for wave in waves:
        host.check_interrupt()
        host.acquire(encoder, host.device(), wave.shape[2] * _SAMPLE_BYTES + _SPARE_BYTES)
        with torch.inference_mode():
            latents.append(encoder.vae.normalise(encoder.vae.encode(wave)).transpose(0, 1)[None].cpu())
    return [latent.clone() for latent in latents]
