"""Weights of the video decoder's ViT, read from diffusers names into the form in which it multiplies.

q, k, v are one product; in every head of q and k the two channels of a rotation pair are neighbours. The bias of v is
folded into the bias of the product after attention, whose rows of weights sum to 1. C width, F hidden width.
"""

from dataclasses import dataclass

import torch

from .tensors import Linear, Reader


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


def read_block(reader: Reader, index: int, width: int, head_dim: int, dtype: torch.dtype) -> Block:
    name = f"decoder.transformer_blocks.{index}"
    parts = [reader.linear(f"{name}.attn.to_{part}", width, width, dtype) for part in "qkv"]
    out = reader.linear(f"{name}.attn.to_out.0", width, width, dtype)
    order = pairs_together(width, head_dim, reader.device)
    query, key, value = (part.weight for part in parts)
    qk_bias = [part.bias[order] for part in parts[:2]]
    out_bias = out.bias.float() + out.weight.float() @ parts[2].bias.float()
    _, hidden = reader.shape(f"{name}.ff.net.2.weight")
    return Block(
        norm1=reader.take(f"{name}.norm1.weight", (width,)),
        qkv=Linear(
            torch.cat([query[order], key[order], value]), torch.cat([*qk_bias, torch.zeros_like(out.bias)])
        ),
        out=Linear(out.weight, out_bias.to(dtype)),
        scale1=reader.take(f"{name}.scale1", (width,)),
        norm2=reader.take(f"{name}.norm2.weight", (width,)),
        ff_in=reader.linear(f"{name}.ff.net.0.proj", 2 * hidden, width, dtype),
        ff_out=reader.linear(f"{name}.ff.net.2", width, hidden, dtype),
        scale2=reader.take(f"{name}.scale2", (width,)),
    )


def pairs_together(width: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Row order of q and k that puts the rotation pairs (i, i + 3D/8) of every head side by side.

    Scores do not change under a common order of both, and a pair becomes one complex number.
    """
    half = 3 * head_dim // 8
    pairs = torch.arange(2 * half, device=device).view(2, half).T.flatten()
    head = torch.cat([pairs, torch.arange(2 * half, head_dim, device=device)])
    return (torch.arange(0, width, head_dim, device=device)[:, None] + head).flatten()
