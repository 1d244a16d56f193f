"""Decode: latents to frames and sound, after making room for it."""

import logging

import torch

from ..fasth3_core.media.probe import probe_audio
from ..fasth3_core.packing.geometry import LATENT_PIXELS, SAMPLE_RATE, frames_of_latents
from . import _host, _latents
from ._host import io
from ._types import CATEGORY, Vae
from ._ui import tell

log = logging.getLogger("fasth3")


class FastH3Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3Decode",
            display_name="FastH3 Decode",
            category=CATEGORY,
            description="Video frames and sound from a sampled latent. Sends the transformer away first if the GPU has "
            "no room for both. The result does not depend on the memory there is.",
            inputs=[
                Vae.Input("vae", tooltip="From FastH3 Load VAE."),
                io.Latent.Input("latent", tooltip="Of FastH3 Sampler, or of ComfyUI's sampler with MiniMax H3."),
                io.Int.Input(
                    "tile_batch", default=0, min=0, max=64, advanced=True,
                    tooltip="256-pixel tiles decoded at once: more is faster and takes more memory. 0 lets the device "
                    "decide. Tiles themselves belong to the model and cannot be resized.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="images", tooltip="All frames, 24 a second."),
                io.Audio.Output(display_name="audio", tooltip="Stereo, 32 kHz, exactly as long as the frames."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, vae, latent, tile_batch=0) -> io.NodeOutput:
        host = _host.get()
        video, audio = _latents.split(latent)
        frames = frames_of_latents(video.shape[2])
        images, waveform = _decode(host, vae, video, audio, frames, tile_batch)
        probe = probe_audio(waveform)
        lines = [f"{frames} frames, sound peak {probe.peak:.2f}, RMS {probe.rms:.3f}"]
        lines += [f"warning: {text}" for text in probe.warnings]
        ui = tell(cls, "\n".join(lines))
        return io.NodeOutput(images, {"waveform": waveform, "sample_rate": SAMPLE_RATE}, ui=ui)


def _decode(
    host: _host.Host, vae, video: torch.Tensor, audio: torch.Tensor, frames: int, tile_batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        return _decode_once(host, vae, video, audio, frames, tile_batch)
    except torch.OutOfMemoryError:
        log.warning("FastH3 Decode: out of memory; sending all models away and decoding tile by tile", exc_info=True)
    # outside the handler, whose traceback keeps the failed attempt's tensors alive
    host.release_all()
    return _decode_once(host, vae, video, audio, frames, 1)


def _decode_once(
    host: _host.Host, vae, video: torch.Tensor, audio: torch.Tensor, frames: int, tile_batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    height, width = (side * LATENT_PIXELS for side in video.shape[3:])
    host.acquire(vae, host.device(), vae.working_bytes(tile_batch, height, width))
    bar = None

    def on_chunk(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or host.progress(total)
        bar(done, None)

    with torch.inference_mode():
        # sound first: it takes a second, and what is wrong with it is known before the long part
        waveform = vae.audio.to_waveform(audio, frames).float().cpu()
        pixels = vae.video.decode(
            video, tile_batch=tile_batch, on_chunk=on_chunk, check_interrupt=host.check_interrupt
        )
    return pixels[0].movedim(0, -1), waveform
