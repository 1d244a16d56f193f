"""Clean time t in [0, 1] to the features that the AdaLN linears read, and those linears.

Three forms: "full" reads silu(MLP(t)), "rank" reads a shared fp16 basis of that, "curve" reads a table over t.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ..config import DiTConfig
from .linear import linear

NUM_MODALITIES = 3
"""Video, text, audio: a block's AdaLN has parameters for each."""
BLOCK_CHUNKS = 6
"""shift, scale, gate of the attention, then of the feed-forward."""
BLOCK_ROWS = NUM_MODALITIES * BLOCK_CHUNKS
"""Rows of a block's AdaLN linear, in multiples of the hidden width."""


def adaln_features(top: Mapping[str, torch.Tensor], config: DiTConfig, times: torch.Tensor) -> torch.Tensor:
    """What the AdaLN linears read, [M, width], for clean times [M] fp32.

    The activation is already in it, so every consumer is a plain linear; a second one is the rank form's classic error.
    """
    if config.adaln == "curve":
        table = top["adaln_t_table"]
        position = times.clamp(0.0, 1.0) * (table.shape[0] - 1)
        lower = position.floor().long().clamp(max=table.shape[0] - 2)
        return torch.lerp(table[lower], table[lower + 1], (position - lower)[:, None])
    half = config.freq_dim // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=times.device) / half)
    angles = times[:, None] * frequencies
    features = torch.cat([angles.cos(), angles.sin()], dim=-1)  # cosines first
    hidden = F.silu(linear(features, top["time_embedder.proj_in.weight"], top["time_embedder.proj_in.bias"]))
    embedded = F.silu(linear(hidden, top["time_embedder.proj_out.weight"], top["time_embedder.proj_out.bias"]))
    if config.adaln == "rank":
        basis = top["adaln_basis.weight"]
        return linear(embedded.to(basis.dtype), basis)
    return embedded


def block_table(features: torch.Tensor, block: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """AdaLN parameters of one block, [M * 3, 6, C]: row 3 m + tag, chunks shift, scale, gate, shift, scale, gate."""
    out = _project(features, block["adaln_proj.linear.weight"], block["adaln_proj.linear.bias"])
    return out.view(features.shape[0] * NUM_MODALITIES, BLOCK_CHUNKS, -1).to(dtype)


def final_table(features: torch.Tensor, top: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """AdaLN parameters of the output norm, [M, 2, C]: shift, then scale. Indexed by time alone, not by modality.

    Left in the dtype of its weights: the fp16 tables of the rank form are multiplied in fp32.
    """
    weight, bias = top["final_layer.adaln_proj.linear.weight"], top["final_layer.adaln_proj.linear.bias"]
    return _project(features, weight, bias).view(features.shape[0], 2, -1)


def _project(features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return linear(features.to(bias.dtype), weight, bias)
