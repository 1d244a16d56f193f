"""Loader nodes. Names from ComfyUI's model folders -> handles; the files are read by the core."""

from ..fasth3_core.checkpoint.load import load_model
from ..fasth3_core.contracts import CONTRACTS
from . import _host
from ._host import io
from ._paths import fingerprint, resolve, weight_names
from ._types import CATEGORY, Model, Vae
from ._ui import tell
from ._vae_pair import VaePair

_MODEL_FOLDER = "diffusion_models"
_VAE_FOLDER = "vae"
_DTYPES = ["auto", "bf16", "fp16", "fp32", "fp8"]


class FastH3LoadModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FastH3LoadModel",
            display_name="FastH3 Load Model",
            category=CATEGORY,
            description="A MiniMax-H3 or FastH3 transformer with the settings it was distilled for. "
            "Reads headers only; weights move to the device when sampling starts.",
            inputs=[
                io.Combo.Input(
                    "model_name", options=weight_names(_host.get().model_roots(_MODEL_FOLDER)),
                    tooltip="From models/diffusion_models: a .safetensors file, or a folder with a sharded model.",
                ),
                io.Combo.Input(
                    "contract", options=["auto", *CONTRACTS], default="auto",
                    tooltip="Which student it is: steps, shifts, sparsity. 'auto' reads it from the tensors and from "
                    "fastvideo_inference.json beside them, and asks for a name where these cannot tell.",
                ),
                io.Combo.Input(
                    "dtype", options=_DTYPES, default="auto",
                    tooltip="Of the weights in memory. 'auto' keeps the file's. 'fp8' halves the blocks when read: "
                    "faster from Ada and Hopper on, not exact. H3 overflows in fp16 (NaN).",
                ),
            ],
            outputs=[Model.Output(display_name="model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name, contract, dtype):
        return fingerprint(resolve(_host.get().model_roots(_MODEL_FOLDER), model_name))

    @classmethod
    def execute(cls, model_name, contract, dtype) -> io.NodeOutput:
        path = resolve(_host.get().model_roots(_MODEL_FOLDER), model_name)
        model = load_model(path, contract=contract, dtype=dtype)
        config = model.config
        text = (
            f"contract {model.contract.name} ({model.contract.about}): {config.num_layers} blocks, "
            f"{config.adaln} AdaLN, {'with' if config.has_gates else 'no'} VSA gates"
        )
        if (chosen := model.details["contract_by"]).startswith("default"):
            text += f"; chosen by {chosen}"
        return io.NodeOutput(model, ui=tell(cls, text))


class FastH3LoadVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        names = weight_names(_host.get().model_roots(_VAE_FOLDER))
        return io.Schema(
            node_id="FastH3LoadVAE",
            display_name="FastH3 Load VAE",
            category=CATEGORY,
            description="The video VAE and the audio VAE of MiniMax-H3, to decode, and to encode keyframes and "
            "references. Reads headers only.",
            inputs=[
                io.Combo.Input("video_vae", options=names, tooltip="From models/vae: the H3 video VAE."),
                io.Combo.Input("audio_vae", options=names, tooltip="From models/vae: the H3 audio VAE (always fp32)."),
                io.Combo.Input(
                    "dtype", options=_DTYPES, default="auto",
                    tooltip="Of the video VAE's decoder. 'auto' is fp16 on a GPU and fp32 on the CPU. 'fp8' is faster "
                    "on NVIDIA GPUs from Ada and Hopper on, and not exact. int8 files stay int8 unless it is 'fp8'.",
                ),
            ],
            outputs=[Vae.Output(display_name="vae")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, video_vae, audio_vae, dtype):
        roots = _host.get().model_roots(_VAE_FOLDER)
        return [fingerprint(resolve(roots, name)) for name in (video_vae, audio_vae)]

    @classmethod
    def execute(cls, video_vae, audio_vae, dtype) -> io.NodeOutput:
        roots = _host.get().model_roots(_VAE_FOLDER)
        pair = VaePair(resolve(roots, video_vae), resolve(roots, audio_vae), dtype)
        pair.check(_host.get().device())
        return io.NodeOutput(pair, ui=tell(cls, pair.note) if pair.note else None)
