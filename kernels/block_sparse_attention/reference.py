"""Ground truth for block_sparse_attention: one head and one query tile at a time. Small sizes only.

S tokens, M video tokens, H heads, D head channels, N tiles, V video tiles, K listed tiles.
"""

from itertools import pairwise

import torch

from ..precision import full_precision_matmul


def block_sparse_attention_reference(
    q_MHD, k_SHD, v_SHD, offsets_N1, index_HVK, count_HV, *, out=None, byte_budget=None
):
    """softmax(q kᵀ / sqrt(D)) v over the tokens of the listed tiles, in fp32; cast once."""
    H, D = q_MHD.shape[1:]
    V = count_HV.shape[1]
    bounds = offsets_N1.tolist()
    first = bounds[-V - 1]
    out = torch.empty_like(q_MHD) if out is None else out
    with full_precision_matmul():
        for h in range(H):
            for i, (start, stop) in enumerate(pairwise(bounds[-V - 1 :])):
                tiles = index_HVK[h, i, : count_HV[h, i]].tolist()
                tokens = [token for n in tiles for token in range(bounds[n], bounds[n + 1])]
                rows = slice(start - first, stop - first)
                logits = q_MHD[rows, h].float() @ k_SHD[tokens, h].float().T / D**0.5
                out[rows, h] = (logits.softmax(dim=-1) @ v_SHD[tokens, h].float()).to(out.dtype)  # no tokens: 0
    return out
