"""Decode: latents to frames and sound on the wires, after making room for it."""

import torch

from ..fasth3_core.media.probe import probe_audio
from ..fasth3_core.packing.geometry import SAMPLE_RATE
from . import _host, _latents
from ._decode import Decoder
from ._host import io
from ._rescue import kept_on_failure
from ._types import CATEGORY, Vae
from ._ui import tell

TILE_BATCH = dict(
    default=0, min=0, max=64, advanced=True,
    tooltip="256-pixel tiles decoded at once: more is faster and takes more memory. 0 lets the device "
    "decide. Tiles themselves belong to the model and cannot be resized.",
)  # fmt: skip


class FastH3Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3Decode",
            display_name="FastH3 Decode",
            category=CATEGORY,
            description="Video frames and sound from a sampled latent, for other nodes. Sends the transformer away "
            "first if the GPU has no room for both, and saves the latent if all fails. FastH3 Decode to Video writes a "
            "file instead of holding all frames in memory.",
            inputs=[
                Vae.Input("vae", tooltip="From FastH3 Load VAE."),
                io.Latent.Input("latent", tooltip="Of FastH3 Sampler, or of ComfyUI's sampler with MiniMax H3."),
                io.Int.Input("tile_batch", **TILE_BATCH),
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
        decoder = Decoder(host, vae, video, audio, tile_batch)
        with kept_on_failure(video, audio):
            # sound first: it takes a second, and what is wrong with it is known before the long part
            waveform = decoder.waveform()
            images = _all_frames(decoder)
        probe = probe_audio(waveform, SAMPLE_RATE)
        lines = [f"{decoder.frames} frames, sound peak {probe.peak:.2f}, RMS {probe.rms:.3f}"]
        lines += [f"warning: {text}" for text in (*decoder.warnings, *probe.warnings)]
        ui = tell(cls, "\n".join(lines))
        return io.NodeOutput(images, {"waveform": waveform, "sample_rate": SAMPLE_RATE}, ui=ui)


def _all_frames(decoder: Decoder) -> torch.Tensor:
    """[F, H, W, 3] on the CPU."""
    host, done = decoder.host, []

    def attempt(tiles: int) -> None:
        bar = None

        def on_chunk(count: int, total: int) -> None:
            nonlocal bar
            bar = bar or host.progress(total)
            bar(count, None)

        done.append(decoder.vae.video.decode(
            decoder.video, tile_batch=tiles, on_chunk=on_chunk, check_interrupt=host.check_interrupt
        ))

    decoder.somewhere(attempt)
    return done[0][0].movedim(0, -1)
