"""From tile lists to token rows: which rows of a per-head key buffer a batch of query tiles reads.

H heads, V video tiles, K listed tiles, S tokens, N tiles; a batch is h heads x n query tiles, B = h n lists.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch


class ListedTokens:
    """Tile lists with what the host must know of them. Reads the device once, when built."""

    def __init__(self, offsets_N1: torch.Tensor, index_HVK: torch.Tensor, count_HV: torch.Tensor):
        H, V, K = index_HVK.shape
        self.offsets, self.index, self.count = offsets_N1, index_HVK, count_HV
        self.sizes = offsets_N1.diff()
        slot_K = torch.arange(K, device=index_HVK.device, dtype=count_HV.dtype)
        self._valid_HVK = slot_K < count_HV[..., None]
        self.sizes_HVK = self.sizes[index_HVK.clamp(min=0)].masked_fill_(~self._valid_HVK, 0)
        """Tokens of every listed tile, 0 after the count."""
        host = torch.cat([self.sizes_HVK.sum(-1, dtype=torch.int32).flatten(), offsets_N1[-V - 1 :]]).cpu()
        self.lengths = host[: H * V].view(H, V)
        """[H, V] on the host: tokens of each list."""
        self.video_bounds: list[int] = (host[H * V :] - host[H * V]).tolist()
        """V + 1 row numbers of the query tiles."""

    def batches(self, bytes_per_token: int, budget: int) -> Iterator[tuple[slice, slice]]:
        """(heads, query tiles) whose gathered tokens stay within the budget: whole heads while they fit."""
        H, V = self.lengths.shape
        fit = max(1, budget // (max(1, self.lengths.max().item()) * bytes_per_token))
        h, n = (_even(H, fit // V), V) if fit >= V else (1, _even(V, fit))
        for head in range(0, H, h):
            for tile in range(0, V, n):
                yield slice(head, min(head + h, H)), slice(tile, min(tile + n, V))

    def query_rows(self, tiles: slice) -> slice:
        return slice(self.video_bounds[tiles.start], self.video_bounds[tiles.stop])

    def query_sizes(self, tiles: slice) -> tuple[torch.Tensor, int, int]:
        """Tokens of each query tile, [n] int32 on the device, with the fewest and the most."""
        bounds = self.video_bounds[tiles.start : tiles.stop + 1]
        host = [b - a for a, b in pairwise(bounds)]
        return self.sizes[-self.lengths.shape[1] :][tiles], min(host), max(host)

    def packed(self, heads: slice, tiles: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a [h * S] key buffer for lists laid end to end, and where each begins: [total], [B + 1] int32."""
        sizes_BK, first_BK = self._runs(heads, tiles)
        total = int(self.lengths[heads, tiles].sum())
        ends = sizes_BK.flatten().cumsum(0, dtype=torch.int32)
        shift = first_BK.flatten() - (ends - sizes_BK.flatten())
        run_of_row = torch.repeat_interleave(sizes_BK.flatten(), output_size=total)
        rows = shift.index_select(0, run_of_row).add_(torch.arange(total, device=ends.device, dtype=torch.int32))
        starts = torch.cat([ends.new_zeros(1), ends.view(sizes_BK.shape)[:, -1]])
        return rows, starts

    def padded(self, heads: slice, tiles: slice, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a [h * S] key buffer, [B, width], each list packed to the front, and which are of the list.

        A row after a list's end repeats its last token, so nothing outside the list is read.
        """
        sizes_BK, first_BK = self._runs(heads, tiles)
        ends_BK = sizes_BK.cumsum(-1, dtype=torch.int32)
        last_B1 = ends_BK[:, -1:]
        place = torch.arange(width, device=ends_BK.device, dtype=torch.int32)
        place_BW = torch.minimum(place, (last_B1 - 1).clamp_(min=0))
        run_BW = torch.searchsorted(ends_BK, place_BW, right=True).clamp_(max=ends_BK.shape[-1] - 1)
        shift_BK = first_BK - (ends_BK - sizes_BK)
        return shift_BK.gather(-1, run_BW) + place_BW, place < last_B1

    def _runs(self, heads: slice, tiles: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Length and first row of every listed tile: [B, K] each."""
        sizes = self.sizes_HVK[heads, tiles]
        head = torch.arange(sizes.shape[0], device=sizes.device, dtype=torch.int32)
        first = self.offsets[self.index[heads, tiles].clamp(min=0)] + (head * self.offsets[-1])[:, None, None]
        return sizes.flatten(0, 1), first.flatten(0, 1)


def _even(total: int, limit: int) -> int:
    """The size of equal parts of `total`, none above `limit`."""
    parts = -(-total // min(limit, total))
    return -(-total // parts)
