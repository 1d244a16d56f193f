"""Tensor operations, one folder each. Knows no model; imports torch, and other kernel packages only when they are used.

Importing this package registers every op that has more than one implementation, and the operators of `library`.
"""

from . import (
    block_sparse_attention,
    bounded_attention,
    coarse_branch,
    dense_attention,
    fp8_linear,
    gated_residual,
    head_norm_rope,
    int8_linear,
    library,
    linear_swiglu,
    qk_norm_rope,
    quantise_rows,
    residual_rms,
    residual_rms_modulate,
    rms_modulate,
    stitch_tiles,
    swiglu,
    tile_mean,
    tile_topk,
)

__all__ = [
    "block_sparse_attention",
    "bounded_attention",
    "coarse_branch",
    "dense_attention",
    "fp8_linear",
    "gated_residual",
    "head_norm_rope",
    "int8_linear",
    "library",
    "linear_swiglu",
    "qk_norm_rope",
    "quantise_rows",
    "residual_rms",
    "residual_rms_modulate",
    "rms_modulate",
    "stitch_tiles",
    "swiglu",
    "tile_mean",
    "tile_topk",
]
