"""A seeded tiny transformer for tests: real structure, every dimension small."""

import torch
from comfyui_fasth3.fasth3_core.weights.tensors import TensorStore

TEXT_DIM = 20


def tiny_tensors(
    *, layers=2, gates=True, hidden=64, heads=2, head_dim=32, ffn=48, rope=4, time_dim=32, seed=0, dtype=torch.float32
):
    """Canonical name -> tensor."""
    generator = torch.Generator().manual_seed(seed)
    inner = heads * head_dim

    def matrix(out, in_):
        return torch.randn(out, in_, generator=generator) / in_**0.5

    def vector(n, scale=0.1):
        return torch.randn(n, generator=generator) * scale

    def block(prefix, main):
        out = {
            f"{prefix}norm1.weight": 1 + vector(hidden),
            f"{prefix}norm2.weight": 1 + vector(hidden),
            f"{prefix}attn.qkv_proj.weight": matrix(3 * inner, hidden),
            f"{prefix}attn.q_norm.weight": 1 + vector(head_dim),
            f"{prefix}attn.k_norm.weight": 1 + vector(head_dim),
            f"{prefix}attn.out_proj.weight": matrix(hidden, inner),
            f"{prefix}mlp.fc1.weight": matrix(2 * ffn, hidden),
            f"{prefix}mlp.fc2.weight": matrix(hidden, ffn),
        }
        if main:
            out[f"{prefix}adaln_proj.linear.weight"] = matrix(18 * hidden, time_dim) * 0.3
            out[f"{prefix}adaln_proj.linear.bias"] = vector(18 * hidden)
        if main and gates:
            out[f"{prefix}attn.to_gate_compress.weight"] = matrix(inner, hidden)
        return out

    tensors = {
        "video_patch_proj.weight": matrix(hidden, 96),
        "video_patch_proj.bias": vector(hidden),
        "audio_patch_proj.weight": matrix(hidden, 32),
        "audio_patch_proj.bias": vector(hidden),
        "condition_proj.weight": matrix(hidden, TEXT_DIM),
        "condition_proj.bias": vector(hidden),
        "time_embedder.proj_in.weight": matrix(hidden, 32),
        "time_embedder.proj_in.bias": vector(hidden),
        "time_embedder.proj_out.weight": matrix(time_dim, hidden),
        "time_embedder.proj_out.bias": vector(time_dim),
        "rope.inv_freq": 10000.0 ** (-torch.arange(rope, dtype=torch.float32) / rope),
        "token_refiner.final_norm.weight": 1 + vector(hidden),
        "final_layer.norm.weight": 1 + vector(hidden),
        "final_layer.adaln_proj.linear.weight": matrix(2 * hidden, time_dim) * 0.3,
        "final_layer.adaln_proj.linear.bias": vector(2 * hidden),
        "final_layer.video_out.weight": matrix(96, hidden),
        "final_layer.video_out.bias": vector(96),
        "final_layer.audio_out.weight": matrix(32, hidden),
        "final_layer.audio_out.bias": vector(32),
    }
    for i in range(2):
        tensors |= block(f"token_refiner.blocks.{i}.", main=False)
    for i in range(layers):
        tensors |= block(f"blocks.{i}.", main=True)
    fp32 = ("video_patch_proj", "audio_patch_proj", "time_embedder", "rope", "final_layer.video_out",
            "final_layer.audio_out")
    return {name: t if name.startswith(fp32) else t.to(dtype) for name, t in tensors.items()}


def tiny_store(**kwargs) -> TensorStore:
    return TensorStore(tiny_tensors(**kwargs))
