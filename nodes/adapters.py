"""FastH3 Apply Adapter. Names from ComfyUI's lora folder and a model -> the model with the adapter."""

from ..fasth3_core.adapters.apply import MODES, UNMATCHED_RULES, Settings, apply_adapter
from ..fasth3_core.contracts import CONTRACTS
from . import _host
from ._host import io
from ._paths import fingerprint, resolve, weight_names
from ._types import CATEGORY, Model
from ._ui import tell

_LORA_FOLDER = "loras"
_MODEL_FOLDER = "diffusion_models"
_NONE = "none"


class FastH3ApplyAdapter(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        host = _host.get()
        return io.Schema(
            node_id="FastH3ApplyAdapter",
            display_name="FastH3 Apply Adapter",
            category=CATEGORY,
            description="Puts a LoRA, or FastVideo's adapter of a FastH3 student, on a model. Chain several. "
            "Reads headers only; every tensor of the file is used or named.",
            inputs=[
                Model.Input("model"),
                io.Combo.Input(
                    "adapter_name", options=weight_names(host.model_roots(_LORA_FOLDER)),
                    tooltip="From models/loras.",
                ),
                io.Float.Input(
                    "strength", default=1.0, min=-20.0, max=20.0, step=0.05,
                    tooltip="1 is as trained, 0 is the model without the adapter, bit by bit.",
                ),
                io.Combo.Input(
                    "contract", options=["auto", *CONTRACTS], default="auto",
                    tooltip="Which student the model becomes. 'auto': what the adapter says of itself, else what the "
                    "model is.",
                ),
                io.Combo.Input(
                    "mode", options=list(MODES), default="auto", advanced=True,
                    tooltip="'auto' merges into float weights as they load and keeps the adapter beside quantised "
                    "ones. 'merge' refuses quantised ones. 'beside' keeps it beside every large weight.",
                ),
                io.Float.Input(
                    "alpha", default=0.0, min=0.0, max=100000.0, step=1.0, advanced=True,
                    tooltip="For files without an alpha: factors count alpha / rank. 0 takes the rank, a scale of 1.",
                ),
                io.Combo.Input(
                    "unmatched", options=list(UNMATCHED_RULES), default="refuse", advanced=True,
                    tooltip="Tensors of the file that fit nothing in the model: an error with their names, or skip.",
                ),
                io.Combo.Input(
                    "adaln_source", options=[_NONE, *weight_names(host.model_roots(_MODEL_FOLDER))], default=_NONE,
                    advanced=True,
                    tooltip="For 'pruned' (curve AdaLN) models and adapters of full AdaLN width: the full model of the "
                    "same release, of which the time embedder is read.",
                ),
            ],
            outputs=[
                Model.Output(display_name="model"),
                io.String.Output(display_name="keys", tooltip="What became of every tensor of the file."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, adapter_name, adaln_source=_NONE, **_):
        host = _host.get()
        source = [] if adaln_source == _NONE else [fingerprint(resolve(host.model_roots(_MODEL_FOLDER), adaln_source))]
        return [fingerprint(resolve(host.model_roots(_LORA_FOLDER), adapter_name)), *source]

    @classmethod
    def execute(
        cls, model, adapter_name, strength, contract, mode, alpha, unmatched, adaln_source
    ) -> io.NodeOutput:
        host = _host.get()
        source = "" if adaln_source == _NONE else str(resolve(host.model_roots(_MODEL_FOLDER), adaln_source))
        settings = Settings(strength=strength, alpha=alpha, mode=mode, unmatched=unmatched, adaln_source=source)
        path = resolve(host.model_roots(_LORA_FOLDER), adapter_name)
        adapted, report = apply_adapter(model, path, settings, contract=contract)
        lines = [report.summary(), f"contract {adapted.contract.name} ({adapted.contract.about})"]
        lines += [f"warning: {text}" for text in report.warnings]
        return io.NodeOutput(adapted, report.to_text(), ui=tell(cls, "\n".join(lines)))
