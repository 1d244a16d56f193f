"""Ragged tiles, lists and an independent oracle for the tests of the sparse ops."""

import torch

GPU_OR_CPU = "cuda" if torch.cuda.is_available() else "cpu"


def offsets_of(sizes):
    return torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)


def random_lists(heads, video_tiles, num_tiles, most):
    """Lists of random length, zero included, in the agreed form."""
    index = torch.full((heads, video_tiles, most), -1, dtype=torch.int32)
    count = torch.randint(0, most + 1, (heads, video_tiles), dtype=torch.int32)
    for h in range(heads):
        for i in range(video_tiles):
            n = int(count[h, i])
            index[h, i, :n] = torch.randperm(num_tiles)[:n].sort().values
    return index, count


def token_mask_attention(q, k, v, offsets, index, count):
    """Attention under a dense [H, M, S] token mask, float64: nothing in common with the gathers under test."""
    tile_of = torch.repeat_interleave(offsets.diff().long())
    video_tiles, num_tiles = count.shape[1], offsets.numel() - 1
    listed = torch.zeros(*count.shape, num_tiles, dtype=torch.bool)
    for h in range(count.shape[0]):
        for i in range(video_tiles):
            listed[h, i, index[h, i, : count[h, i]].long()] = True
    query_tile = tile_of[-q.shape[0] :] - (num_tiles - video_tiles)
    allowed = listed[:, query_tile][:, :, tile_of]
    logits = torch.einsum("mhd,shd->hms", q.double(), k.double()) / q.shape[-1] ** 0.5
    weights = logits.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hms,shd->mhd", weights, v.double())


def fused(tokens, heads, dim, dtype=torch.float32):
    """q, k, v as views of one projection's output: strides of [S, 3, H, D]."""
    return torch.randn(tokens, 3, heads, dim).to(dtype).unbind(1)


def relative_error(out, reference):
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()
