"""tile_mean with torch alone: tiles padded to one size, a bounded number at a time, summed in fp32.

Deterministic on every device, which a scatter-add is not: a score that moves by one bit can select another tile.
"""

import torch

_BYTES = 128 << 20
"""Of gathered rows at a time."""


def tile_mean_eager(x_SHD, offsets_N1, tile_size):
    S, H, D = x_SHD.shape
    N = offsets_N1.numel() - 1
    starts_N, sizes_N = offsets_N1[:-1], offsets_N1.diff()
    slot_E = torch.arange(tile_size, device=x_SHD.device, dtype=offsets_N1.dtype)
    out_HND = torch.empty(H, N, D, dtype=torch.float32, device=x_SHD.device)
    step = max(1, _BYTES // (tile_size * H * D * x_SHD.element_size()))
    for a in range(0, N, step):
        sizes = sizes_N[a : a + step]
        rows_nE = starts_N[a : a + step, None] + slot_E
        x = x_SHD.index_select(0, rows_nE.clamp_(max=S - 1).flatten()).flatten(1)
        wide = x.view(torch.int64) if x.shape[1] * x.element_size() % 8 == 0 else x  # fewer, wider elements to zero
        wide.masked_fill_((slot_E >= sizes[:, None]).view(-1, 1), 0)
        sum_nHD = x.view(-1, tile_size, H, D).sum(dim=1, dtype=torch.float32)
        out_HND[:, a : a + step] = (sum_nHD / sizes[:, None, None]).transpose(0, 1)
    return out_HND
