"""From tile lists to token rows: which rows of a per-head key buffer a batch of query tiles reads.

H heads, V video tiles, K listed tiles, N tiles; a batch is h heads x n query tiles, B = h n lists.
"""

import math
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F

_MOST_HEADS = 4
"""Of a batch that does not have all query tiles of its heads."""


class ListedTokens:
    """Tile lists with what the host must know of them, cut into batches. Reads the device once, when built."""

    def __init__(self, offsets_N1: torch.Tensor, index_HVK: torch.Tensor, count_HV: torch.Tensor, split: bool):
        """`split`: leave the prefix out of the lists (`shared` tells) if each has all of it and something else."""
        H, V, K = index_HVK.shape
        P = offsets_N1.numel() - 1 - V
        sizes_N = offsets_N1.diff()
        valid_HVK = torch.arange(K, device=index_HVK.device, dtype=torch.int32) < count_HV[..., None]
        sizes_HVK = sizes_N[index_HVK.clamp(min=0)].masked_fill_(~valid_HVK, 0)
        prefix_P = torch.arange(P, device=index_HVK.device, dtype=torch.int32)
        has_prefix = (index_HVK[..., :P] == prefix_P).all() & (count_HV.min() > P)
        host = torch.cat([sizes_HVK.sum(-1, dtype=torch.int32).flatten(), offsets_N1, has_prefix.int()[None]]).cpu()
        bounds = host[H * V : -1].tolist()

        self.shared: int = bounds[P] if split and host[-1] else 0
        """Leading tokens that belong to every list and are left out of it."""
        first = P if self.shared else 0
        self.granule: int = math.gcd(*(b - a for a, b in pairwise(bounds[first:])))
        """Every listed tile is a whole number of runs of this many tokens, counted from `shared`."""
        self.lengths = host[: H * V].view(H, V) - self.shared
        """[H, V] on the host: tokens of each list."""
        self._video_bounds = [row - bounds[P] for row in bounds[P:]]
        self._video_sizes_V = sizes_N[P:]
        self._sizes_HVK = sizes_HVK[..., first:]
        self._first_HVK = offsets_N1[index_HVK[..., first:].clamp(min=0)] - self.shared
        self._rows = bounds[-1] - self.shared

    def batches(self, fit: int, wave: int) -> list[tuple[slice, slice]]:
        """(heads, query tiles) of at most `fit` lists, in few rounds of `wave` lists that the device runs at once.

        Few heads at a time: their keys are read again and again, and should stay in cache.
        """
        H, V = self.lengths.shape
        fit = max(1, fit)
        if fit >= V:
            shapes = [(_even(H, fit // V), V)]
        else:
            shapes = [(h, _even(V, fit // h)) for h in range(1, min(_MOST_HEADS, fit, H) + 1)]

        def cost(shape: tuple[int, int]) -> tuple[int, int]:
            h, n = shape
            batches = -(-H // h) * -(-V // n)
            return batches * -(-h * n // wave), batches

        h, n = min(shapes, key=cost)
        return [
            (slice(head, min(head + h, H)), slice(tile, min(tile + n, V)))
            for head in range(0, H, h)
            for tile in range(0, V, n)
        ]

    def query_rows(self, tiles: slice) -> slice:
        return slice(self._video_bounds[tiles.start], self._video_bounds[tiles.stop])

    def query_sizes(self, tiles: slice) -> tuple[torch.Tensor, int, int]:
        """Tokens of each query tile, [n] int32 on the device, with the fewest and the most."""
        host = [b - a for a, b in pairwise(self._video_bounds[tiles.start : tiles.stop + 1])]
        return self._video_sizes_V[tiles], min(host), max(host)

    def packed(self, heads: slice, tiles: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Lists laid end to end: granules of a key buffer of h heads, and the token at which each list begins.

        Returns:
            [total granules] int32, [B + 1] int32.
        """
        sizes_HVK, totals_HV, shift_HVK = self._granules
        totals_B = totals_HV[heads, tiles].flatten()
        starts_B1 = F.pad(totals_B.cumsum(0, dtype=torch.int32), (1, 0))
        head_h = torch.arange(heads.stop - heads.start, device=totals_B.device, dtype=torch.int32)
        place_hn = starts_B1[:-1].view(len(head_h), -1) - (head_h * (self._rows // self.granule))[:, None]
        shift = (shift_HVK[heads, tiles] - place_hn[..., None]).flatten()
        total = int(self.lengths[heads, tiles].sum()) // self.granule
        run_of_row = torch.repeat_interleave(sizes_HVK[heads, tiles].flatten(), output_size=total)
        rows = shift.index_select(0, run_of_row).add_(torch.arange(total, device=shift.device, dtype=torch.int32))
        return rows, starts_B1 * self.granule

    def padded(self, heads: slice, tiles: slice, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of a key buffer of h heads, [B, width], each list packed to the front, and which are of the list.

        A token after a list's end repeats its last one, so nothing outside the list is read.
        """
        sizes_hnK, first_hnK = self._sizes_HVK[heads, tiles], self._first_HVK[heads, tiles]
        head_h = torch.arange(first_hnK.shape[0], device=first_hnK.device, dtype=torch.int32)
        ends_hnK = sizes_hnK.cumsum(-1, dtype=torch.int32)
        shift_hnK = first_hnK + (head_h * self._rows)[:, None, None] - (ends_hnK - sizes_hnK)
        ends_BK, shift_BK = ends_hnK.flatten(0, 1), shift_hnK.flatten(0, 1)
        last_B1 = ends_BK[:, -1:]
        place = torch.arange(width, device=ends_BK.device, dtype=torch.int32)
        place_BW = torch.minimum(place, (last_B1 - 1).clamp_(min=0))
        run_BW = torch.searchsorted(ends_BK, place_BW, right=True).clamp_(max=ends_BK.shape[-1] - 1)
        return shift_BK.gather(-1, run_BW) + place_BW, place < last_B1

    @cached_property
    def _granules(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In granules: length of each listed tile, of each list, and (first row - place in its list) of each tile."""
        sizes_HVK = self._sizes_HVK // self.granule
        ends_HVK = sizes_HVK.cumsum(-1, dtype=torch.int32)
        shift_HVK = (self._first_HVK // self.granule).sub_(ends_HVK).add_(sizes_HVK)
        return sizes_HVK, ends_HVK[..., -1], shift_HVK


def _even(total: int, limit: int) -> int:
    """The size of equal parts of `total`, none above `limit`."""
    parts = -(-total // min(limit, total))
    return -(-total // parts)
