"""Decode to Video: latents to a file, clip by clip, in as little memory as two clips take."""

import logging
from collections import deque
from dataclasses import replace
from pathlib import Path

from ..fasth3_core.media import latent_file
from ..fasth3_core.media.delivery import delivering
from ..fasth3_core.media.formats import AUDIO_CODECS, BIT_DEPTHS, DEFAULT_CRF, FORMATS, Output, output
from ..fasth3_core.media.preview import frames_preview
from ..fasth3_core.packing.geometry import FPS, SAMPLE_RATE
from ..fasth3_core.vae.resume import Delivery
from . import _claim, _host, _latents, _movie, _output_name, _rescue
from ._colours import Fitting, fitting
from ._decode import Decoder
from ._host import io
from ._types import CATEGORY, Report, Vae
from ._ui import tell
from .decoding import TILE_BATCH

log = logging.getLogger("fasth3")

KEEP = ("on failure", "always")


class FastH3DecodeToVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3DecodeToVideo",
            display_name="FastH3 Decode to Video",
            category=CATEGORY,
            description="Decodes a sampled latent straight into a video file with sound: each clip is encoded while "
            "the next one is decoded, so memory does not grow with the length. Shows frames as they come. If memory "
            "runs out it goes on in smaller batches, then on another device or the CPU; if all fails it saves the "
            "latent.",
            inputs=[
                Vae.Input("vae", tooltip="From FastH3 Load VAE."),
                io.Latent.Input("latent", tooltip="Of FastH3 Sampler, or of ComfyUI's sampler with MiniMax H3."),
                io.String.Input(
                    "filename_prefix", default="video/FastH3",
                    tooltip="In the output folder; may name a subfolder and use %date:yyyy-MM-dd% or %width%.",
                ),
                io.Combo.Input(
                    "format", options=list(FORMATS), default="mp4 h264",
                    tooltip="H.264 plays everywhere. H.265 and AV1 are smaller and slower to encode. Lossless is FFV1. "
                    "'png frames' makes a folder of pictures and a WAV.",
                ),
                io.Int.Input(
                    "crf", default=DEFAULT_CRF, min=0, max=63,
                    tooltip="Quality: lower is better and larger. 18 looks lossless in H.264; H.265 and AV1 need a "
                    "higher number for the same picture (22, 30). Lossless formats do not read it.",
                ),
                io.Combo.Input(
                    "bit_depth", options=list(map(str, BIT_DEPTHS)), default="8", advanced=True,
                    tooltip="10 avoids bands in smooth skies. No browser plays 10-bit H.264.",
                ),
                io.Combo.Input(
                    "audio_codec", options=list(AUDIO_CODECS), default="auto", advanced=True,
                    tooltip="'auto': AAC in MP4, FLAC beside lossless pictures. 'none' leaves the sound out.",
                ),
                io.Combo.Input(
                    "keep_latent", options=list(KEEP), default=KEEP[0], advanced=True,
                    tooltip="When to save the latent for FastH3 Load Latent: only if decoding fails, or always, before "
                    "it begins.",
                ),
                io.Int.Input("tile_batch", **TILE_BATCH),
                Report.Input("report", optional=True, tooltip="Of FastH3 Sampler: shown here and stored in the file."),
            ],
            outputs=[
                io.String.Output(display_name="file", tooltip="Full path of the video, or of the folder of pictures."),
                io.Audio.Output(display_name="audio", tooltip="Stereo, 32 kHz, exactly as long as the frames."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix=None, format=None, crf=None, bit_depth=None, audio_codec=None):
        settings = (format, bit_depth, crf, audio_codec)
        if None not in settings:  # else another node gives one of them
            try:
                output(*settings)
            except ValueError as error:
                return str(error)
        return _output_name.problem(filename_prefix)

    @classmethod
    def execute(
        cls, vae, latent, filename_prefix, format="mp4 h264", crf=DEFAULT_CRF, bit_depth="8", audio_codec="auto",
        keep_latent=KEEP[0], tile_batch=0, report=None,
    ) -> io.NodeOutput:  # fmt: skip
        host = _host.get()
        video, audio = _latents.split(latent)
        decoder = Decoder(host, vae, video, audio, tile_batch)
        height, width = decoder.size
        with _rescue.kept_on_failure(video, audio, report) as keep:
            settings = output(format, bit_depth, crf, audio_codec)
            _output_name.check(filename_prefix)
            with _claim.output_file(filename_prefix, settings.form.suffix, width, height) as file:
                if keep_latent == "always":
                    path = _movie.beside(file.path, settings, latent_file.SUFFIX)
                    keep(replace(file, path=path, filename=path.name))
                waveform = decoder.waveform()
                track = _movie.check_sound(
                    file.path, settings, width, height, decoder.frames, waveform[0], SAMPLE_RATE
                )
                facts = {"format": format, "bit_depth": settings.bit_depth, "crf": settings.crf}
                metadata = _movie.metadata(cls, host, report, track, **facts)
                with fitting(vae, video) as fit:
                    _write(decoder, file.path, settings, track, metadata, fit)
                unkept = track.keep_raw()
        lines = [f"{file.filename}: {width}x{height}, {decoder.frames} frames ({decoder.frames / FPS:.2f} s), {format}"]
        lines += [f"warning: {text}" for text in decoder.warnings] + [*_movie.lines(track), *unkept]
        told = "\n".join(lines)
        shown = told if report is None else f"{told}\n{report.to_text()}"
        movie = bool(settings.form.muxer)
        first = file if movie else replace(
            file, filename="00001.png", subfolder="/".join(filter(None, (file.subfolder, file.filename)))
        )
        ui = tell(cls, shown, logged=told, images=[first.as_ui()], animated=(movie,))
        return io.NodeOutput(str(file.path), {"waveform": waveform, "sample_rate": SAMPLE_RATE}, ui=ui)


def _write(
    decoder: Decoder, path: Path, settings: Output, track: _movie.Track, metadata: dict, fit: Fitting
) -> None:
    """Decode and encode at once. The bar counts tiles, and shows frames of the clip that was finished last."""
    height, width = decoder.size
    host, newest = decoder.host, deque(maxlen=1)
    bar, of = None, 0

    def on_chunk(done: int, total: int) -> None:
        nonlocal bar, of
        if bar is None or total != of:  # a later attempt counts what is left
            bar, of = host.progress(total), total
        bar(done, newest.pop() if newest else None)

    def on_written(frames_FHWC) -> None:  # in the encoder's thread, where the host does not know which node runs
        try:
            newest.append(frames_preview(frames_FHWC))
        except Exception:  # a video must not be lost for a thumbnail
            log.warning("FastH3 Decode to Video: no picture of the last clip", exc_info=True)

    with delivering(
        path, settings, width, height, sound=track.sound, metadata=metadata, on_written=on_written
    ) as put:

        def handed_on(frames_FHWC, clip: int) -> None:
            fit(frames_FHWC, clip)
            put(frames_FHWC)

        delivery = Delivery(decoder.video, handed_on)
        decoder.somewhere(lambda tiles: delivery.attempt(decoder.vae.video, tiles, on_chunk, host.check_interrupt))
