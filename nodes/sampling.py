"""The sampler node: prompt, latent and settings -> the core's request, and its result back onto the wires."""

import time

import torch

from ..fasth3_core.model.handle import H3Model
from ..fasth3_core.packing.geometry import LATENT_PIXELS
from ..fasth3_core.planning import Wanted, plan
from ..fasth3_core.sampling.loop import sample
from ..fasth3_core.sampling.request import Request
from ..fasth3_core.sampling.settings import GRIDS, RunSettings, resolve
from ..fasth3_core.weights.placement import Offload
from . import _conditioning, _host, _latents, _placing
from ._host import io
from ._previews import step_shower
from ._types import CATEGORY, Model, Report, Vsa
from ._types import Offload as OffloadWire
from ._ui import tell

_SHIFT = dict(default=0.0, min=0.0, max=100.0, step=0.01, advanced=True)


class FastH3Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3Sampler",
            display_name="FastH3 Sampler",
            category=CATEGORY,
            description="Runs the steps that the model was distilled with, video and audio together. Guidance is 1 and "
            "there is no negative prompt: distilled students have neither. Batch is 1; queue several seeds instead.",
            inputs=[
                Model.Input("model"),
                io.Conditioning.Input(
                    "positive", tooltip="From ComfyUI's text encode (CLIPLoader, type 'minimax') or MiniMax H3 nodes, "
                    "or from FastH3 Load Prompt Embeds.",
                ),
                io.Latent.Input(
                    "latent", tooltip="Gives size and length: FastH3 Empty Latent, or a MiniMax H3 node's.",
                ),
                io.Int.Input(
                    "seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=True,
                    tooltip="Of the starting noise, drawn on the CPU: the same on every device.",
                ),
                Vsa.Input("vsa", optional=True, tooltip="FastH3 VSA Config. Not connected: as distilled."),
                OffloadWire.Input(
                    "offload", optional=True, tooltip="FastH3 Offload. Not connected: all weights on the device.",
                ),
                io.Combo.Input(
                    "grid", options=list(GRIDS), default="contract",
                    tooltip="Steps of the noise schedule: as released, equally spaced, or the rungs used in training.",
                ),
                io.Float.Input("shift_video", **_SHIFT, tooltip="Shift of the video schedule. 0 is the contract's."),
                io.Float.Input("shift_audio", **_SHIFT, tooltip="Shift of the audio schedule. 0 is the contract's."),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="For FastH3 Decode, or ComfyUI's own H3 VAE decoders."),
                Report.Output(display_name="report", tooltip="What ran: steps, backends, and every departure."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, model, positive, latent, seed, vsa=None, offload=None, grid="contract", shift_video=0.0, shift_audio=0.0
    ) -> io.NodeOutput:
        offload = _placing.check(offload)
        host = _host.get()
        video, audio = _latents.split(latent)
        prompt = _conditioning.read(positive, model.config.text_dim)
        request = Request(
            text_states=prompt.text_states, token_tags=prompt.token_tags, keyframes=prompt.keyframes,
            references=prompt.references, latent_frames=video.shape[2], latent_height=video.shape[3],
            latent_width=video.shape[4], audio_latents=audio.shape[3], seed=seed,
        )
        device = host.device()
        # everything that can be wrong is found here, before other models are sent away and weights are read
        request.check(model)
        settings = resolve(model, vsa, grid, shift_video, shift_audio, request.task)
        wanted = _wanted(model, request, settings, device)
        wanted = _placing.place(model, offload, wanted, device)
        planned = plan(wanted, model.store.placement)
        try:
            started = time.perf_counter()
            host.acquire(model.store, device, wanted.sizes.beside(model.store.placement, planned.run.working))
            loading = time.perf_counter() - started
            result = sample(
                model, request, device=device, vsa=vsa, grid=grid, shift_video=shift_video, shift_audio=shift_audio,
                pass_rows=wanted.pass_rows, check_interrupt=host.check_interrupt,
                on_step=step_shower(host, settings.video.num_forwards),
            )
        finally:
            _after_run(host, model, offload)
        result.report.seconds["load"] += loading
        result.report.memory["planned_bytes"] = planned.peak_bytes
        if video.any() or audio.any():
            result.report.warnings.append("the latent is not empty: it gives size and length, its content is not read")
        ui = tell(cls, result.report.to_text())
        return io.NodeOutput(_latents.join(result.video, result.audio), result.report, ui=ui)


def _after_run(host: _host.Host, model: H3Model, offload: Offload | None) -> None:
    if offload is not None and offload.after_run != "keep":
        host.give_back(model.store)
        if offload.after_run == "free_all":
            model.store.forget()


def _wanted(model: H3Model, request: Request, settings: RunSettings, device: torch.device) -> Wanted:
    """What the plan counts.

    Raises BackendUnavailable if a named backend cannot run there, GeometryError for conditions that do not fit.
    """
    text, *conditions, _ = request.layout().prefix
    return Wanted(
        width=request.latent_width * LATENT_PIXELS, height=request.latent_height * LATENT_PIXELS,
        frames=request.frames, text_tokens=text, condition_tokens=sum(conditions),
        forwards=settings.video.num_forwards, config=model.config, vsa=settings.vsa, sizes=model.store.sizes(device),
        element_size=model.store.dtype_on(device).itemsize, eager=_placing.gathers(model, settings, device),
        dequantised=model.store.widened_bytes(), fp8=model.store.fp8,
    )
