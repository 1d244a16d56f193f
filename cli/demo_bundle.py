"""Writes the demo's models: a student and a base as sharded transformers in diffusers layout, an adapter that makes the
base another student, both VAEs, and an encoded prompt."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..fasth3_core.atomic import replacing
from ..fasth3_core.checkpoint.load import RECORD
from ..fasth3_core.checkpoint.save import save
from ..fasth3_core.selftest.random_adapter import random_adapter
from ..fasth3_core.selftest.random_weights import random_transformer
from ..nodes import _prompt_file
from ..nodes._conditioning import Prompt
from .demo_weights import audio_decoder, video_decoder

_DIMS = dict(
    num_layers=4, hidden_size=128, num_heads=2, head_dim=64, ffn_dim=256, text_dim=64, freq_dim=64,
    time_embed_hidden_dim=128, time_embed_dim=64, rope_freq_dim=8,
)
_CONTRACT = {
    "model_id": "fasth3-demo", "dmd_denoising_steps": [999, 749, 500, 250], "num_inference_steps": 5,
    "guidance_scale": 1.0, "attention_backend": "VIDEO_SPARSE_ATTN_H3", "vsa_sparsity": 0.9, "vsa_tile_size": 64,
    "video_scheduler_shift": 12.0, "audio_scheduler_shift": 3.0,
}
_SHARDS = 2
_SEED = 0
_TEXT_TOKENS = 24


@dataclass(frozen=True)
class BundleNames:
    """What the loader nodes call the files."""

    model: str = "fasth3_demo/transformer"
    base_model: str = "h3_demo/transformer"
    adapter: str = "fasth3_demo_adapter.safetensors"
    video_vae: str = "fasth3_demo_video_vae.safetensors"
    audio_vae: str = "fasth3_demo_audio_vae.safetensors"
    prompt: str = "fasth3_prompt.safetensors"


def write_bundle(out: Path) -> BundleNames:
    """Make `out`/models and `out`/input; every file is there whole or not at all."""
    names = BundleNames()
    models, inputs = out / "models", out / "input"
    _write_transformer(models / "diffusion_models" / names.model)
    (models / "loras").mkdir(parents=True, exist_ok=True)
    _write_base(models / "diffusion_models" / names.base_model, models / "loras" / names.adapter)
    (models / "vae").mkdir(parents=True, exist_ok=True)
    _write(models / "vae" / names.video_vae, video_decoder(_SEED))
    _write(models / "vae" / names.audio_vae, audio_decoder(_SEED))
    inputs.mkdir(parents=True, exist_ok=True)
    states = torch.randn(1, _TEXT_TOKENS, _DIMS["text_dim"], generator=torch.Generator().manual_seed(_SEED))
    prompt = Prompt(states.bfloat16(), torch.ones(_TEXT_TOKENS, dtype=torch.int64))
    _prompt_file.save(inputs / names.prompt, prompt, {"prompt": "seeded noise in place of a prompt"})
    return names


def _write_transformer(folder: Path) -> None:
    """Shards with their index, the configuration, and the contract at the root of the release."""
    config = {"rope_freq_dim": _DIMS["rope_freq_dim"]}
    save(random_transformer(**_DIMS, seed=_SEED), folder, layout="diffusers", shards=_SHARDS, config=config)
    with replacing(folder.parent / RECORD) as partial:
        partial.write_text(json.dumps(_CONTRACT, indent=1), encoding="utf-8")


def _write_base(folder: Path, adapter: Path) -> None:
    """The same without gates and contract, and FastVideo's form of adapter, which brings both."""
    base = random_transformer(**_DIMS, gates=False, seed=_SEED)
    save(base, folder, layout="diffusers", shards=_SHARDS, config={"rope_freq_dim": _DIMS["rope_freq_dim"]})
    tensors, metadata = random_adapter(base, seed=_SEED)
    _write(adapter, tensors, metadata)


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    with replacing(path) as partial:
        save_file(tensors, partial, metadata=metadata)
