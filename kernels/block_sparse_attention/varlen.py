"""Attention of one batch of lists with torch's packed variable-length kernel: nothing is padded and nothing masked.

h heads, R query tokens a head, D head channels, T = h R.
"""

import torch
import torch.nn.functional as F


def attend_varlen(q_hRD, shared_kv, listed_kv, lists, heads, tiles):
    """[h, R, D]. `shared_kv` [h, shared, 2D] belongs to every list; `listed_kv` [h, rest, 2D] is what lists pick from.

    The shared tokens are attended in place, without a gather, and the two softmaxes are merged.
    """
    h, R, D = q_hRD.shape
    q_T1D = q_hRD.reshape(h * R, 1, D)
    runs, starts_k = lists.packed(heads, tiles)
    kv = listed_kv.view(-1, lists.granule * 2 * D).index_select(0, runs).view(-1, 1, 2 * D)
    sizes_n, _, longest_q = lists.query_sizes(tiles)
    starts_q = F.pad(sizes_n.repeat(h).cumsum(0, dtype=torch.int32), (1, 0))
    longest_k = int(lists.lengths[heads, tiles].max())
    out_TD, lse_T = _varlen(q_T1D, kv, starts_q, starts_k, longest_q, longest_k)
    if lists.shared:
        head = torch.arange(h + 1, device=q_hRD.device, dtype=torch.int32)
        shared = shared_kv.view(-1, 1, 2 * D)
        shared_TD, shared_lse_T = _varlen(q_T1D, shared, head * R, head * lists.shared, R, lists.shared)
        weight_T1 = torch.sigmoid(lse_T - shared_lse_T)[:, None]
        out_TD = torch.lerp(shared_TD.float(), out_TD.float(), weight_T1)
    return out_TD.view(h, R, D)


def _varlen(q_T1D, kv, starts_q, starts_k, longest_q, longest_k):
    """[T, D] and the log of each row's softmax sum, [T] fp32."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # torch 2.10

    D = q_T1D.shape[-1]
    out_T1D, lse = varlen_attn(
        q_T1D, kv[..., :D], kv[..., D:], starts_q, starts_k, longest_q, longest_k, return_aux=AuxRequest(lse=True)
    )
    return out_T1D[:, 0], lse.flatten()
