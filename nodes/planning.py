"""The plan node: what a request will take on this machine, before anything is loaded."""

from ..fasth3_core.packing.geometry import FPS, snap_frames
from ..fasth3_core.planning import Wanted, plan
from ..fasth3_core.sampling.settings import resolve
from . import _host, _placing
from ._canvas import ASPECTS, CUSTOM, choose_canvas
from ._host import io
from ._types import CATEGORY, Model, Offload, Vsa
from ._ui import tell


class FastH3Plan(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3Plan",
            display_name="FastH3 Plan",
            category=CATEGORY,
            description="What a video will take: tokens, tiles, memory on the device and the host, and time. Reads no "
            "weights. Fails, and says what would fit, where the sampler would. Sizes are snapped as in FastH3 Empty "
            "Latent; connect width, height and seconds to it.",
            inputs=[
                Model.Input("model"),
                io.Int.Input("width", default=1344, min=32, max=4096, step=32,
                             tooltip="Pixels, to the nearest multiple of 32. Read when aspect is 'custom'."),
                io.Int.Input("height", default=768, min=32, max=4096, step=32,
                             tooltip="Pixels, to the nearest multiple of 32. Read when aspect is 'custom'."),
                io.Float.Input("seconds", default=5.0, min=0.1, max=60.0, step=0.1,
                               tooltip="Length, up to the next 17k + 5 frames."),
                io.Combo.Input("aspect", options=[CUSTOM, *ASPECTS], default=CUSTOM,
                               tooltip="'custom' takes width and height; any other replaces them."),
                io.Float.Input("megapixels", default=0.0, min=0.0, max=4.0, step=0.05,
                               tooltip="Area in millions of pixels when aspect is not 'custom'. 0 is the model's own."),
                io.Int.Input("text_tokens", default=300, min=1, max=100_000,
                             tooltip="Length of the prompt in tokens; four letters are about one."),
                Vsa.Input("vsa", optional=True, tooltip="FastH3 VSA Config. Not connected: as distilled."),
                Offload.Input("offload", optional=True, tooltip="FastH3 Offload. Not connected: all weights on the "
                              "device."),
            ],
            outputs=[
                io.Int.Output(display_name="width"),
                io.Int.Output(display_name="height"),
                io.Float.Output(display_name="seconds"),
                io.Int.Output(display_name="frames"),
                io.String.Output(display_name="plan"),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,  # what is free changes from run to run
        )

    @classmethod
    def execute(
        cls, model, width, height, seconds, aspect, megapixels, text_tokens, vsa=None, offload=None
    ) -> io.NodeOutput:
        device = _host.get().device()
        width, height = choose_canvas(aspect, megapixels, width, height)
        frames, settings = snap_frames(seconds), resolve(model, vsa)
        wanted = Wanted(
            width=width, height=height, frames=frames, text_tokens=text_tokens,
            forwards=settings.video.num_forwards, config=model.config, vsa=settings.vsa,
            sizes=model.store.sizes(device), element_size=model.store.dtype_on(device).itemsize,
            eager=_placing.gathers(model, settings, device), dequantised=model.store.widened_bytes(),
            fp8=model.store.fp8,
        )
        wanted, placement = _placing.choose_for(model, _placing.check(offload), wanted, device)
        text = plan(wanted, placement).to_text()
        return io.NodeOutput(width, height, frames / FPS, frames, text, ui=tell(cls, text))
