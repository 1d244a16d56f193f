"""coarse_branch with torch alone: the broadcast to tokens goes a bounded number of rows at a time."""

import torch

from ..precision import full_precision_matmul

_BYTES = 64 << 20
"""Of broadcast rows at a time."""


def coarse_branch_eager(out_SHD, scores_HNN, v_mean_HND, gate_SHD, offsets_N1):
    S, H, D = out_SHD.shape
    with full_precision_matmul():
        coarse_HND = torch.softmax(scores_HNN, dim=-1) @ v_mean_HND
    coarse_NHD = coarse_HND.to(out_SHD.dtype).transpose(0, 1).contiguous()
    tile_S = torch.repeat_interleave(offsets_N1.diff(), output_size=S)
    step = max(1, _BYTES // (H * D * out_SHD.element_size()))
    for a in range(0, S, step):
        rows = coarse_NHD.index_select(0, tile_S[a : a + step])
        out_SHD[a : a + step].addcmul_(rows, gate_SHD[a : a + step])
    return out_SHD
