"""A seeded adapter in FastVideo's form for a given base: for tests and the demo."""

import re
from collections import Counter
from collections.abc import Mapping

import torch

from ..checkpoint.names import from_canonical

_PAIRS = re.compile(
    r"(transformer_blocks|token_refiner\.refiner_blocks)\.\d+\."
    r"(attn\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2)|adaln_proj\.linear)"
)
"""Layers that the released adapters change by low-rank pairs; all else is changed by exact differences."""

_RANK = 4


def random_adapter(
    base: Mapping[str, torch.Tensor], *, gates: bool = True, seed: int = 0, size: float = 0.1,
    dtype: torch.dtype = torch.bfloat16, student: str = "FastVideo/FastVideo-FastH3-4-step-Preview-v1-VSA-DataFree",
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:  # fmt: skip
    """(tensors, metadata) of an adapter to a base in canonical names.

    Args:
        gates: whether it brings VSA gates, which the base then lacks.
        size: of the changes, as a part of the weights'.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, *shape: int, scale: float) -> None:
        tensors[name] = (torch.randn(shape, generator=generator) * scale).to(dtype)

    for name, weight in from_canonical(base, "diffusers").items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and _PAIRS.fullmatch(layer):
            rows, columns = weight.shape
            put(f"{layer}.lora_A.weight", _RANK, columns, scale=columns**-0.5)
            put(f"{layer}.lora_B.weight", rows, _RANK, scale=size * _RANK**-0.5)
        else:
            put(f"{layer}.diff{'_b' * (leaf == 'bias')}", *weight.shape, scale=size * float(weight.std()))
    if gates:
        blocks = {name.split(".")[1] for name in base if name.startswith("blocks.")}
        for block in sorted(blocks, key=int):
            rows = base[f"blocks.{block}.attn.qkv_proj.weight"].shape[0] // 3
            columns = base[f"blocks.{block}.attn.qkv_proj.weight"].shape[1]
            name = f"transformer_blocks.{block}.attn.to_gate_compress.set_weight"
            put(name, rows, columns, scale=columns**-0.5)
    roles = Counter(name.rpartition(".")[2] for name in tensors)
    return tensors, {
        "format": "fastvideo-lora-v2",
        "base_model": "MiniMaxAI/MiniMax-H3",
        "base_revision": "seeded noise",
        "finetuned_model": student,
        "rank": str(_RANK),
        "low_rank_tensors": str(roles["weight"]),
        "diff_tensors": str(roles["diff"] + roles["diff_b"]),
        "set_weight_tensors": str(roles["set_weight"]),
    }
