"""Ground truth for coarse_branch. S tokens, H heads, D head channels, N tiles."""

import torch

from ..precision import full_precision_matmul


def coarse_branch_reference(out_SHD, scores_HNN, v_mean_HND, gate_SHD, offsets_N1):
    """out + gate * (softmax over all tiles of the scores, times the tile means of v), one value a tile; in place."""
    with full_precision_matmul():
        coarse_HND = (torch.softmax(scores_HNN, dim=-1) @ v_mean_HND).to(out_SHD.dtype)
    rows_SHD = coarse_HND.transpose(0, 1).repeat_interleave(offsets_N1.diff().long(), dim=0)
    return out_SHD.copy_(out_SHD.float() + rows_SHD.float() * gate_SHD.float())
