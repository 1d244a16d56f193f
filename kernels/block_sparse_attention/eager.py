"""block_sparse_attention with torch alone: gather the listed keys and values, then attend with a fused kernel.

Sparsity saves work on every device because only listed tokens are gathered, a bounded number of query tiles at a time.
Tiles are ragged, so a list's tokens are packed to its front: torch's variable-length attention takes the packed form
as it is; elsewhere the ends of a batch's shorter lists are masked.

H heads, V video tiles, K listed tiles, D head channels; a batch is h heads x n query tiles, B = h n lists, R query
tokens a head, L keys a list.
"""

import torch
import torch.nn.functional as F

from ..device import flash_varlen_why_not
from .lists import ListedTokens

_BYTES = {"cuda": 512 << 20, "cpu": 16 << 20}
"""Default budget for gathered keys and values by device type. On a CPU they should stay near its cache."""

_OTHER_BYTES = 256 << 20

_MASK_ALIGN = 16
"""Masked lists are padded to a multiple of this: CUDA kernels copy masks of other widths."""


def block_sparse_attention_eager(q_MHD, k_SHD, v_SHD, offsets_N1, index_HVK, count_HV, *, out=None, byte_budget=None):
    D = q_MHD.shape[-1]
    lists = ListedTokens(offsets_N1, index_HVK, count_HV)
    varlen = flash_varlen_why_not(q_MHD.device, q_MHD.dtype, D) is None
    attend = _attend_varlen if varlen else _attend_masked
    budget = byte_budget or _BYTES.get(q_MHD.device.type, _OTHER_BYTES)
    out = torch.empty_like(q_MHD) if out is None else out
    packed_heads = None
    for heads, tiles in lists.batches(2 * D * q_MHD.element_size(), budget):
        if heads != packed_heads:
            kv_hS2D = _interleaved(k_SHD[:, heads], v_SHD[:, heads])
            packed_heads = heads
        rows = lists.query_rows(tiles)
        q_hRD = q_MHD[rows, heads].transpose(0, 1)
        out[rows, heads] = attend(q_hRD, kv_hS2D, lists, heads, tiles).transpose(0, 1)
    return out


def _interleaved(k_ShD, v_ShD):
    """[h, S, 2D]: a token's key and value side by side, so that one gather brings both."""
    S, h, D = k_ShD.shape
    kv_hS2D = torch.empty(h, S, 2 * D, dtype=k_ShD.dtype, device=k_ShD.device)
    kv_hS2D[..., :D] = k_ShD.transpose(0, 1)
    kv_hS2D[..., D:] = v_ShD.transpose(0, 1)
    return kv_hS2D


def _attend_varlen(q_hRD, kv_hS2D, lists, heads, tiles):
    from torch.nn.attention.varlen import varlen_attn

    h, R, D = q_hRD.shape
    rows, starts_k = lists.packed(heads, tiles)
    kv = kv_hS2D.view(-1, 2 * D).index_select(0, rows)
    sizes_n, _, longest_q = lists.query_sizes(tiles)
    starts_q = F.pad(sizes_n.repeat(h).cumsum(0, dtype=torch.int32), (1, 0))
    longest_k = int(lists.lengths[heads, tiles].max())
    q, k, v = q_hRD.reshape(h * R, 1, D), kv[:, None, :D], kv[:, None, D:]
    return varlen_attn(q, k, v, starts_q, starts_k, longest_q, longest_k).view(h, R, D)


def _attend_masked(q_hRD, kv_hS2D, lists, heads, tiles):
    h, R, D = q_hRD.shape
    lengths = lists.lengths[heads, tiles]
    shortest, longest = lengths.min().item(), lengths.max().item()
    if longest == 0:
        return q_hRD.new_zeros(h, R, D)
    ragged = shortest < longest
    width = -(-longest // _MASK_ALIGN) * _MASK_ALIGN if ragged else longest
    rows_BL, valid_BL = lists.padded(heads, tiles, width)
    kv_BL2D = kv_hS2D.view(-1, 2 * D).index_select(0, rows_BL.flatten()).view(-1, 1, width, 2 * D)
    q_BED, slots = _equal_tiles(q_hRD, *lists.query_sizes(tiles))
    out_BED = F.scaled_dot_product_attention(
        q_BED, kv_BL2D[..., :D], kv_BL2D[..., D:], attn_mask=valid_BL[:, None, None] if ragged else None
    )
    if shortest == 0:
        out_BED.masked_fill_((lengths == 0).flatten().to(out_BED.device)[:, None, None, None], 0)
    return out_BED.reshape(h, -1, D)[:, slots] if slots is not None else out_BED.reshape(h, R, D)


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
