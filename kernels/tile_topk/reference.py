"""Ground truth for tile_topk. H heads, V video query tiles, N = P prefix + V video tiles, K listed tiles."""

import torch


def tile_topk_reference(scores_HVN, num_prefix, kept, mode):
    """Best-scoring tiles of each query tile, equal scores to the lower tile, listed in ascending order."""
    H, V, _ = scores_HVN.shape
    K = kept + num_prefix
    if mode == "exempt":
        best = scores_HVN[..., num_prefix:].sort(dim=-1, descending=True, stable=True).indices[..., :kept]
        prefix = torch.arange(num_prefix, device=scores_HVN.device).expand(H, V, num_prefix)
        chosen_HVK = torch.cat([prefix, best + num_prefix], dim=-1)
    else:
        chosen_HVK = scores_HVN.sort(dim=-1, descending=True, stable=True).indices[..., :K]
    index_HVK = chosen_HVK.sort(dim=-1).values.to(torch.int32)
    return index_HVK, torch.full((H, V), K, dtype=torch.int32, device=scores_HVN.device)
