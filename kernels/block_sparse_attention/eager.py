"""block_sparse_attention with torch alone: gather the listed keys and values, then attend with a fused kernel.

Sparsity saves work on every device because only listed tokens are gathered, a bounded number of query tiles at a time.
H heads, V video tiles, K listed tiles, D head channels; a batch is h heads x n query tiles, B = h n lists, R query
tokens a head, W keys a list. Figures: bench/README.md.
"""

import torch
import torch.nn.functional as F

from ..device import flash_varlen_why_not
from .lists import ListedTokens
from .varlen import attend_varlen

_CUDA_BYTES, _CPU_BYTES, _OTHER_BYTES = 1 << 30, 16 << 20, 256 << 20
"""Default budgets for gathered keys and values. CUDA: this or one full round of lists, whichever is more. On a CPU they
should stay near its cache."""

_CUDA_SHARE = 1 / 16
"""Of a CUDA device's memory, at most."""

_LISTS_PER_MULTIPROCESSOR = 2
"""Query tiles that a CUDA multiprocessor attends to at once; a batch that is no multiple leaves some of them idle."""

_MASK_ALIGN = 16
"""Masked lists are padded to a multiple of this: CUDA kernels copy masks of other widths."""


def block_sparse_attention_eager(q_MHD, k_SHD, v_SHD, offsets_N1, index_HVK, count_HV, *, out=None, byte_budget=None):
    device, D = q_MHD.device, q_MHD.shape[-1]
    varlen = flash_varlen_why_not(device, q_MHD.dtype, D) is None
    lists = ListedTokens(offsets_N1, index_HVK, count_HV, split=varlen)
    attend = attend_varlen if varlen else _attend_masked
    bytes_per_list = max(1, lists.lengths.max().item()) * 2 * D * q_MHD.element_size()
    fit = (byte_budget or _default_budget(device, bytes_per_list)) // bytes_per_list
    out = torch.empty_like(q_MHD) if out is None else out
    packed_heads = None
    for heads, tiles in lists.batches(fit, _wave(device)):
        if heads != packed_heads:
            shared_kv = _interleaved(k_SHD[: lists.shared, heads], v_SHD[: lists.shared, heads])
            listed_kv = _interleaved(k_SHD[lists.shared :, heads], v_SHD[lists.shared :, heads])
            packed_heads = heads
        rows = lists.query_rows(tiles)
        q_hRD = q_MHD[rows, heads].transpose(0, 1)
        out[rows, heads] = attend(q_hRD, shared_kv, listed_kv, lists, heads, tiles).transpose(0, 1)
    return out


def _default_budget(device: torch.device, bytes_per_list: int) -> int:
    if device.type == "cuda":
        most = int(torch.cuda.get_device_properties(device).total_memory * _CUDA_SHARE)
        return min(most, max(_CUDA_BYTES, bytes_per_list * _wave(device)))
    return _CPU_BYTES if device.type == "cpu" else _OTHER_BYTES


def _wave(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return _LISTS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _interleaved(k_ShD, v_ShD):
    """[h, S, 2D]: a token's key and value side by side, so that one gather brings both."""
    S, h, D = k_ShD.shape
    kv_hS2D = torch.empty(h, S, 2 * D, dtype=k_ShD.dtype, device=k_ShD.device)
    kv_hS2D[..., :D] = k_ShD.transpose(0, 1)
    kv_hS2D[..., D:] = v_ShD.transpose(0, 1)
    return kv_hS2D


def _attend_masked(q_hRD, shared_kv, listed_kv, lists, heads, tiles):
    """Any device: each list packed to the front of a row; where lengths differ, the ends are masked."""
    h, R, D = q_hRD.shape
    lengths = lists.lengths[heads, tiles]
    shortest, longest = lengths.min().item(), lengths.max().item()
    if longest == 0:
        return q_hRD.new_zeros(h, R, D)
    ragged = shortest < longest
    width = -(-longest // _MASK_ALIGN) * _MASK_ALIGN if ragged else longest
    rows_BW, valid_BW = lists.padded(heads, tiles, width)
    kv_BW2D = listed_kv.view(-1, 2 * D).index_select(0, rows_BW.flatten()).view(-1, 1, width, 2 * D)
    q_BED, slots_R = _equal_tiles(q_hRD, *lists.query_sizes(tiles))
    mask = valid_BW[:, None, None] if ragged else None
    out_BED = F.scaled_dot_product_attention(q_BED, kv_BW2D[..., :D], kv_BW2D[..., D:], attn_mask=mask)
    if shortest == 0:
        out_BED.masked_fill_((lengths == 0).flatten().to(out_BED.device)[:, None, None, None], 0)
    return out_BED.reshape(h, -1, D)[:, slots_R] if slots_R is not None else out_BED.reshape(h, R, D)


def _equal_tiles(q_hRD, sizes_n, shortest, longest):
    """[B, 1, E, D] with short query tiles filled up from their neighbours, and which rows are real (None: all)."""
    _, R, D = q_hRD.shape
    if shortest == longest:
        return q_hRD.reshape(-1, 1, longest, D), None
    starts_n = sizes_n.cumsum(0) - sizes_n
    place_E = torch.arange(longest, device=q_hRD.device)
    rows_nE = (starts_n[:, None] + place_E).clamp_(max=R - 1)
    tile_R = torch.repeat_interleave(sizes_n, output_size=R)
    slots_R = torch.arange(R, device=q_hRD.device) - starts_n[tile_R] + tile_R * longest
    return q_hRD[:, rows_nE.flatten()].view(-1, 1, longest, D), slots_R
