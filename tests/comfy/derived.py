"""Files that this package makes from the tiny stock-format models: an adapter of the dense one, and it in 8 bits."""

from pathlib import Path

from comfyui_fasth3.fasth3_core.checkpoint.component import open_component
from comfyui_fasth3.fasth3_core.checkpoint.convert import Choice, convert
from comfyui_fasth3.fasth3_core.checkpoint.names import plan_transformer
from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter
from safetensors.torch import load_file, save_file

ADAPTER = "loras/tiny_adapter.safetensors"
FORMS = {"int8": Choice(form="int8"), "fp8": Choice(form="fp8"), "int8_adaln": Choice(form="int8", adaln=True)}


def derive(models: Path) -> None:
    source = models / "diffusion_models" / "tiny_dense.safetensors"
    tensors, metadata = random_adapter(load_file(source))
    (models / ADAPTER).parent.mkdir(exist_ok=True)
    save_file(tensors, models / ADAPTER, metadata=metadata)
    component = open_component(source)
    for form, choice in FORMS.items():
        path = source.with_name(f"tiny_dense_ours_{form}.safetensors")
        convert(component, plan_transformer(component), path, choice)
