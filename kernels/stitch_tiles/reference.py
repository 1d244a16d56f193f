"""Ground truth for stitch_tiles, frame by frame, in fp32; also what runs without Triton. R x K tiles, C colours."""

import torch

FRAMES, SIDE = 4, 16
"""Of a patch."""


def stitch_tiles_reference(tiles_BNP, rows, columns, first, out_CFHW, broken, scale=None, shift=None, previous=None):
    h, w = rows.size // SIDE, columns.size // SIDE
    patches = tiles_BNP.view(rows.tiles, columns.tiles, -1, h, w, out_CFHW.shape[0], FRAMES, SIDE, SIDE)
    down, right = rows.weight[:, None, None], columns.weight[:, None]
    for index in range(out_CFHW.shape[1]):
        t, f = divmod(first + index, FRAMES)
        pictures_RKCHW = patches[:, :, t, :, :, :, f].permute(0, 1, 4, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4).float()

        def picked(r, c, y, x, pictures=pictures_RKCHW) -> torch.Tensor:
            """[H, W, C] of tile (r, c) at its line (y, x)."""
            return pictures[r[:, None], c, :, y[:, None], x]

        own = picked(rows.tile, columns.tile, rows.at, columns.at)
        above = picked(rows.tile - 1, columns.tile, rows.before.clamp(max=rows.size - 1), columns.at)
        beside = picked(rows.tile, columns.tile - 1, rows.at, columns.before.clamp(max=columns.size - 1))
        value = torch.where(down > 0, own + down * (above - own), own)
        value = torch.where(right > 0, value + right * (beside - value), value).permute(2, 0, 1)
        if previous is not None and index < previous.shape[1]:
            value = value + (1 - index / previous.shape[1]) * (previous[:, index].float() - value)
        broken |= ~value.isfinite().all()
        if scale is not None:
            value = (value * scale[:, None, None] + shift[:, None, None]).clamp(0, 1)
        out_CFHW[:, index] = value
