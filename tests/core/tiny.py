"""A seeded tiny transformer for tests: real structure, every dimension small."""

import torch
from comfyui_fasth3.fasth3_core.selftest.random_weights import random_transformer
from comfyui_fasth3.fasth3_core.weights.tensors import TensorStore

TEXT_DIM = 20

_DIMS = dict(
    num_layers=2, hidden_size=64, num_heads=2, head_dim=32, ffn_dim=48, text_dim=TEXT_DIM, freq_dim=32,
    time_embed_hidden_dim=64, time_embed_dim=32, rope_freq_dim=4,
)


def tiny_tensors(**changes) -> dict[str, torch.Tensor]:
    """Canonical name -> tensor; see `random_transformer` for what may be changed."""
    return random_transformer(**(_DIMS | changes))


def tiny_store(**changes) -> TensorStore:
    return TensorStore(tiny_tensors(**changes))
