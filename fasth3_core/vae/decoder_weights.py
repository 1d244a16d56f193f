"""Weights of the video decoder's ViT, read from diffusers names into the form in which it multiplies.

q, k, v are one product; in every head of q and k the two channels of a rotation pair are neighbours. The bias of v is
folded into the bias of the product after attention, whose rows of weights sum to 1. A weight is a tensor, int8 as the
file has it, or float8 made here.
"""

from dataclasses import dataclass, replace

import torch

from ...kernels.quantise_rows import quantise_rows
from .tensors import Linear, Reader, Weight


@dataclass(frozen=True)
class Block:
    norm1: torch.Tensor
    qkv: Linear
    """Rows of q, k, then v, whose bias is 0."""
    out: Linear
    scale1: torch.Tensor
    norm2: torch.Tensor
    ff_in: Linear
    """Rows of the value, then of the gate."""
    ff_out: Linear
    scale2: torch.Tensor


def read_block(reader: Reader, index: int, width: int, head_dim: int, dtype: torch.dtype, form: str) -> Block:
    """One block; int8 weights of the file stay int8 unless `form`, of quantise_rows, asks for another."""
    name = f"decoder.transformer_blocks.{index}"
    keep = form == ""
    parts = [reader.linear(f"{name}.attn.to_{part}", width, width, dtype, keep) for part in "qkv"]
    out = reader.linear(f"{name}.attn.to_out.0", width, width, dtype, keep)
    order = pairs_together(width, head_dim, reader.device)
    query, key, value = (part.weight for part in parts)
    qk_bias = [part.bias[order] for part in parts[:2]]
    out_bias = out.bias.float() + _plain(out.weight, torch.float32) @ parts[2].bias.float()
    _, hidden = reader.shape(f"{name}.ff.net.2.weight")
    qkv = Linear(_joined(_rows(query, order), _rows(key, order), value), torch.cat([*qk_bias, 0 * out.bias]))
    return Block(
        norm1=reader.take(f"{name}.norm1.weight", (width,)),
        qkv=_packed(qkv, form),
        out=_packed(Linear(out.weight, out_bias.to(dtype)), form),
        scale1=reader.take(f"{name}.scale1", (width,)),
        norm2=reader.take(f"{name}.norm2.weight", (width,)),
        ff_in=_packed(reader.linear(f"{name}.ff.net.0.proj", 2 * hidden, width, dtype, keep), form),
        ff_out=_packed(reader.linear(f"{name}.ff.net.2", width, hidden, dtype, keep), form),
        scale2=reader.take(f"{name}.scale2", (width,)),
    )


def _packed(layer: Linear, form: str) -> Linear:
    return Linear(quantise_rows(layer.weight, form), layer.bias) if form else layer


def _plain(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight.dequantise(dtype)


def _rows(weight: Weight, order: torch.Tensor) -> Weight:
    if isinstance(weight, torch.Tensor):
        return weight[order]
    return replace(weight, data=weight.data[order], scale=weight.scale[order])


def _joined(*weights: Weight) -> Weight:
    """One weight of the rows of several; those of a file are quantised alike, or not at all."""
    if isinstance(weights[0], torch.Tensor):
        return torch.cat(weights)
    return replace(weights[0], data=torch.cat([w.data for w in weights]), scale=torch.cat([w.scale for w in weights]))


def pairs_together(width: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Row order of q and k that puts the rotation pairs (i, i + 3D/8) of every head side by side.

    Scores do not change under a common order of both, and a pair becomes one complex number.
    """
    half = 3 * head_dim // 8
    pairs = torch.arange(2 * half, device=device).view(2, half).T.flatten()
    head = torch.cat([pairs, torch.arange(2 * half, head_dim, device=device)])
    return (torch.arange(0, width, head_dim, device=device)[:, None] + head).flatten()
