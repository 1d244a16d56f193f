"""A transformer of any size with seeded random weights: for tests, the demo and benchmarks.

Scales keep the activations of a deep stack near one, so that a full-size run stays finite in bf16.
"""

import torch

from ..model.blocks import inverse_frequencies
from ..model.time import BLOCK_ROWS
from ..weights.policy import weight_dtype

FULL_SIZE = dict(
    num_layers=50, hidden_size=5376, num_heads=56, head_dim=128, ffn_dim=14336, text_dim=5120, freq_dim=256,
    time_embed_hidden_dim=5376, time_embed_dim=2688, rope_freq_dim=16,
)
"""The released model: 33.1 B parameters, 35.0 B with gates."""


def random_transformer(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
    ffn_dim: int,
    text_dim: int,
    freq_dim: int,
    time_embed_hidden_dim: int,
    time_embed_dim: int,
    rope_freq_dim: int,
    gates: bool = True,
    output_heads: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Canonical name -> tensor, made on `device`; the fp32 modules of the release are fp32 whatever `dtype`."""
    generator = torch.Generator(device).manual_seed(seed)
    inner = num_heads * head_dim
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, *shape: int, scale: float, offset: float = 0.0) -> None:
        kind = weight_dtype(name, "full", dtype)
        tensors[name] = torch.empty(shape, dtype=kind, device=device).normal_(offset, scale, generator=generator)

    def linear(name: str, out: int, in_: int, bias: bool = False, gain: float = 1.0) -> None:
        put(f"{name}.weight", out, in_, scale=gain * in_**-0.5)
        if bias:
            put(f"{name}.bias", out, scale=0.1)

    def block(prefix: str, gated: bool, modulated: bool) -> None:
        for norm, width in (("norm1", hidden_size), ("norm2", hidden_size), ("attn.q_norm", head_dim),
                            ("attn.k_norm", head_dim)):
            put(f"{prefix}{norm}.weight", width, scale=0.1, offset=1.0)
        linear(f"{prefix}attn.qkv_proj", 3 * inner, hidden_size)
        linear(f"{prefix}attn.out_proj", hidden_size, inner)
        linear(f"{prefix}mlp.fc1", 2 * ffn_dim, hidden_size)
        linear(f"{prefix}mlp.fc2", hidden_size, ffn_dim)
        if modulated:
            linear(f"{prefix}adaln_proj.linear", BLOCK_ROWS * hidden_size, time_embed_dim, bias=True, gain=0.3)
        if gated:
            linear(f"{prefix}attn.to_gate_compress", inner, hidden_size)

    linear("video_patch_proj", hidden_size, 96, bias=True)
    linear("audio_patch_proj", hidden_size, 32, bias=True)
    linear("condition_proj", hidden_size, text_dim, bias=True)
    linear("time_embedder.proj_in", time_embed_hidden_dim, freq_dim, bias=True)
    linear("time_embedder.proj_out", time_embed_dim, time_embed_hidden_dim, bias=True)
    tensors["rope.inv_freq"] = inverse_frequencies(rope_freq_dim).to(device)
    for i in range(2):
        block(f"token_refiner.blocks.{i}.", gated=False, modulated=False)
    put("token_refiner.final_norm.weight", hidden_size, scale=0.1, offset=1.0)
    for i in range(num_layers):
        block(f"blocks.{i}.", gated=gates, modulated=True)
    put("final_layer.norm.weight", hidden_size, scale=0.1, offset=1.0)
    linear("final_layer.adaln_proj.linear", 2 * hidden_size, time_embed_dim, bias=True, gain=0.3)
    linear("final_layer.video_out", output_heads * 96, hidden_size, bias=True)
    linear("final_layer.audio_out", output_heads * 32, hidden_size, bias=True)
    return tensors
