"""Tensor operations, one folder each. Knows no model; imports torch, and other kernel packages only when they are used.

Importing this package registers every op that has more than one implementation.
"""

from . import block_sparse_attention, coarse_branch, dense_attention, int8_linear, tile_mean, tile_topk

__all__ = ["block_sparse_attention", "coarse_branch", "dense_attention", "int8_linear", "tile_mean", "tile_topk"]
