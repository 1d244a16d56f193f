"""Operators of attention. S tokens, H heads, D head channels, N tiles of which P prefix and V video, K listed."""

import torch

from .. import registry
from .define import operator

_tile_mean_operator = operator(
    "tile_mean",
    "(str backend, Tensor x, Tensor offsets, SymInt tile_size) -> Tensor",
    lambda x, offsets, tile_size: x.new_empty(
        x.shape[1], offsets.shape[0] - 1, x.shape[2], dtype=torch.float32
    ),
)


@registry.traced("tile_mean")
def tile_mean(backend, x, offsets, tile_size):
    return _tile_mean_operator(backend, x, offsets, tile_size)


def _tile_topk_fake(scores, num_prefix, kept, mode):
    H, V, _ = scores.shape
    index = scores.new_empty(H, V, num_prefix + kept, dtype=torch.int32)
    return index, scores.new_empty(H, V, dtype=torch.int32)


_tile_topk_operator = operator(
    "tile_topk",
    "(str backend, Tensor scores, int num_prefix, int kept, str mode) -> (Tensor, Tensor)",
    _tile_topk_fake,
)


@registry.traced("tile_topk")
def tile_topk(backend, scores, num_prefix, kept, mode):
    return _tile_topk_operator(backend, scores, num_prefix, kept, mode)


def _block_sparse_attention(implementation, q, k, v, offsets, index, count, out, byte_budget):
    implementation(q, k, v, offsets, index, count, out=out, byte_budget=byte_budget)


_block_sparse_attention_operator = operator(
    "block_sparse_attention",
    "(str backend, Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor index, Tensor count, Tensor(a!) out, "
    "int? byte_budget) -> ()",
    lambda q, k, v, offsets, index, count, out, byte_budget: None,
    _block_sparse_attention,
)


@registry.traced("block_sparse_attention")
def block_sparse_attention(backend, q, k, v, offsets, index, count, *, out=None, byte_budget=None):
    out = q.new_empty(q.shape) if out is None else out
    _block_sparse_attention_operator(backend, q, k, v, offsets, index, count, out, byte_budget)
    return out


def _coarse_branch(implementation, out, scores, v_mean, gate, offsets):
    implementation(out, scores, v_mean, gate, offsets)


_coarse_branch_operator = operator(
    "coarse_branch",
    "(str backend, Tensor(a!) out, Tensor scores, Tensor v_mean, Tensor gate, Tensor offsets) -> ()",
    lambda out, scores, v_mean, gate, offsets: None,
    _coarse_branch,
)


@registry.traced("coarse_branch")
def coarse_branch(backend, out, scores, v_mean, gate, offsets):
    _coarse_branch_operator(backend, out, scores, v_mean, gate, offsets)
    return out


def _dense_attention(implementation, q, k, v, out):
    implementation(q, k, v, out=out)


_dense_attention_operator = operator(
    "dense_attention",
    # always with `out`: torch's own result is laid out as its kernel likes, which differs from one to the next
    "(str backend, Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()",
    lambda q, k, v, out: None,
    _dense_attention,
)


@registry.traced("dense_attention")
def dense_attention(backend, q, k, v, out=None):
    out = q.new_empty(q.shape) if out is None else out
    _dense_attention_operator(backend, q, k, v, out)
    return out
