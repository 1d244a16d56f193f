"""Files that this package makes from the tiny stock-format models: an adapter of the dense one, it in 8 bits, and a
student with a bank of output heads."""

from pathlib import Path

import torch
from comfyui_fasth3.fasth3_core.checkpoint.component import open_component
from comfyui_fasth3.fasth3_core.checkpoint.convert import Choice, convert
from comfyui_fasth3.fasth3_core.checkpoint.names import plan_transformer
from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter
from safetensors.torch import load_file, save_file

ADAPTER = "loras/tiny_adapter.safetensors"
FORMS = {"int8": Choice(form="int8"), "fp8": Choice(form="fp8"), "int8_adaln": Choice(form="int8", adaln=True)}


OMNI = "diffusion_models/tiny_omni.safetensors"
HEADS = 32


def derive(models: Path) -> None:
    source = models / "diffusion_models" / "tiny_dense.safetensors"
    tensors, metadata = random_adapter(load_file(source))
    (models / ADAPTER).parent.mkdir(exist_ok=True)
    save_file(tensors, models / ADAPTER, metadata=metadata)
    component = open_component(source)
    for form, choice in FORMS.items():
        path = source.with_name(f"tiny_dense_ours_{form}.safetensors")
        convert(component, plan_transformer(component), path, choice)
    save_file(with_bank(load_file(source.with_name("tiny_vsa_curve.safetensors"))), models / OMNI)


def with_bank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first head, and behind it the small differences of the others to it, as single files store them."""
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.startswith(("final_layer.video_out", "final_layer.audio_out"))]:
        head = tensors[name]
        others = torch.randn((HEADS - 1, *head.shape), generator=generator) * 0.02
        tensors[name] = torch.cat([head, others.flatten(0, 1).to(head.dtype)])
    return tensors
