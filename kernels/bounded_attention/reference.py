"""Ground truth for bounded_attention. S tokens in sequences of N, H heads, D head channels."""

from ..precision import full_precision_matmul


def bounded_attention_reference(q_SHD, k_SHD, v_SHD, length):
    """softmax(q kᵀ / sqrt(D)) v of every sequence and head, in fp32; cast once."""
    q, k, v = (x.float().unflatten(0, (-1, length)).transpose(1, 2) for x in (q_SHD, k_SHD, v_SHD))
    with full_precision_matmul():
        out = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(dim=-1) @ v
    return out.transpose(1, 2).flatten(2).flatten(0, 1).to(q_SHD.dtype)
