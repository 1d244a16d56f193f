"""Ground truth for dense_attention. M query and S key tokens, H heads, D head channels."""

import torch

from ..precision import full_precision_matmul


def dense_attention_reference(q_MHD, k_SHD, v_SHD, out=None):
    """softmax(q kᵀ / sqrt(D)) v in fp32, one head at a time; cast once."""
    out_MHD = torch.empty_like(q_MHD) if out is None else out
    with full_precision_matmul():
        for h in range(q_MHD.shape[1]):
            logits_MS = q_MHD[:, h].float() @ k_SHD[:, h].float().T / q_MHD.shape[-1] ** 0.5
            out_MHD[:, h] = logits_MS.softmax(dim=-1) @ v_SHD[:, h].float()
    return out_MHD
