"""Where the weights are kept. Widgets -> Offload; the sampler fits it to what is free when it runs."""

from ..fasth3_core.weights.placement import AFTER_RUN, POLICIES, Offload
from ._host import io
from ._types import CATEGORY
from ._types import Offload as OffloadWire

_DEFAULT = Offload()


class FastH3Offload(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3Offload",
            display_name="FastH3 Offload",
            category=CATEGORY,
            description="For models that do not fit into device memory: blocks wait in host memory and visit the "
            "device while the one before computes. The result has the same bits. Connect it to FastH3 Sampler.",
            inputs=[
                io.Combo.Input(
                    "policy", options=list(POLICIES), default=_DEFAULT.policy,
                    tooltip="'resident': all on the device. 'stream': from host memory. 'mmap': from a temporary file, "
                    "for little host memory. 'auto': the first of these that fits.",
                ),
                io.Float.Input(
                    "device_gib", default=_DEFAULT.device_gib, min=0.0, max=1024.0, step=0.5,
                    tooltip="Device memory that weights and activations may take, in GiB. 0: all that is free.",
                ),
                io.Int.Input(
                    "slots", default=_DEFAULT.slots, min=2, max=16, advanced=True,
                    tooltip="Streamed blocks that are on the device at once. More help only where copies are slow and "
                    "uneven.",
                ),
                io.Int.Input(
                    "resident_blocks", default=_DEFAULT.resident_blocks, min=-1, max=1024, advanced=True,
                    tooltip="Blocks that stay on the device while the others stream. -1: as many as fit.",
                ),
                io.Float.Input(
                    "pinned_gib", default=_DEFAULT.pinned_gib, min=-1.0, max=1024.0, step=1.0, advanced=True,
                    tooltip="Host memory that may be page-locked, which makes copies fast, in GiB. -1: what ComfyUI "
                    "allows, 0: none.",
                ),
                io.Combo.Input(
                    "after_run", options=list(AFTER_RUN), default=_DEFAULT.after_run, advanced=True,
                    tooltip="'keep' for the next run until others need the room; 'free_device' gives the device memory "
                    "back when sampling ends; 'free_all' the host copies, too.",
                ),
            ],
            outputs=[OffloadWire.Output(display_name="offload")],
        )

    @classmethod
    def execute(cls, policy, device_gib, slots, resident_blocks, pinned_gib, after_run) -> io.NodeOutput:
        return io.NodeOutput(
            Offload(
                policy=policy, device_gib=device_gib, slots=slots, resident_blocks=resident_blocks,
                pinned_gib=pinned_gib, after_run=after_run,
            )
        )
