"""tile_topk with torch alone: a stable sort where the device has one, else a threshold with ties counted from the left.

On an H200 at 56 x 660 x 660: stable sort 1.70 ms, threshold 2.21, top-k over 64-bit keys of score and tile 2.87.
"""

import torch

from .reference import tile_topk_reference

_STABLE_SORT = ("cpu", "cuda")
"""Device types on which torch keeps the order of equal values when asked to; others ignore the request."""


def tile_topk_eager(scores_HVN, num_prefix, kept, mode):
    if scores_HVN.device.type in _STABLE_SORT:
        return tile_topk_reference(scores_HVN, num_prefix, kept, mode)
    return tile_topk_threshold(scores_HVN, num_prefix, kept, mode)


def tile_topk_threshold(scores_HVN, num_prefix, kept, mode):
    """No order of indices is asked of the device: only values are selected, and tiles counted."""
    H, V, _ = scores_HVN.shape
    first = num_prefix if mode == "exempt" else 0
    room = kept + num_prefix - first
    scores_HVC = scores_HVN[..., first:].nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    last_HV1 = scores_HVC.topk(room, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_HVC, ties_HVC = scores_HVC > last_HV1, scores_HVC == last_HV1
    spare_HV1 = room - above_HVC.sum(-1, keepdim=True, dtype=torch.int32)
    chosen_HVC = above_HVC | (ties_HVC & (ties_HVC.cumsum(-1, dtype=torch.int32) <= spare_HV1))
    # the r-th chosen tile goes to place r, every other tile to a place that is cut off
    place_HVC = (chosen_HVC.cumsum(-1, dtype=torch.int32) - 1).masked_fill_(~chosen_HVC, room)
    tile_C = torch.arange(first, scores_HVN.shape[-1], device=scores_HVN.device, dtype=torch.int32)
    index_HVK = torch.empty(H, V, first + room + 1, device=scores_HVN.device, dtype=torch.int32)
    index_HVK[..., :first] = torch.arange(first, device=scores_HVN.device, dtype=torch.int32)
    index_HVK[..., first:].scatter_(-1, place_HVC.long(), tile_C.expand(H, V, -1))
    count_HV = torch.full((H, V), kept + num_prefix, dtype=torch.int32, device=scores_HVN.device)
    return index_HVK[..., :-1].contiguous(), count_HV
