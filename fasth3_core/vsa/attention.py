"""Video sparse attention: text, conditions and audio attend to everything; a video tile attends to its best tiles.

S tokens in tile order, P prefix and V video tiles, N = P + V, H heads, D head channels. Everything is per head.
"""

from dataclasses import dataclass, replace

import torch

from ...kernels import registry
from ...kernels.device import Case
from ...kernels.registry import BackendUnavailable, Resolved
from ..config import VSAConfig
from .selection import pooled_scores
from .tiles import PART_SIZE, TilePlan

SCORE_BYTES = 128 << 20
"""Of pooled scores at a time; heads beyond it wait their turn."""


@dataclass(frozen=True)
class VSAOps:
    """The implementations that one run uses. Each counts its calls."""

    tile_mean: Resolved
    tile_topk: Resolved
    block_sparse_attention: Resolved
    coarse_branch: Resolved
    dense_attention: Resolved
    whole_tiles: bool
    """Whether block_sparse_attention takes the plan's tiles; if not, it gets them in parts."""

    def table(self) -> list[dict]:
        """A row per op: implementation, calls, reasons of those refused."""
        return registry.table(op for op in vars(self).values() if isinstance(op, Resolved))


def resolve_ops(backend: str, case: Case) -> VSAOps:
    """Decide once per run.

    A backend names an implementation of block_sparse_attention, which must then run; the other ops follow it where
    they have one of that name and take their best one where they have not.

    Raises:
        BackendUnavailable: a named implementation cannot run, with every reason.
    """
    in_parts = replace(case, tile_size=min(case.tile_size, PART_SIZE))
    main = registry.resolve("block_sparse_attention", backend, in_parts)
    return VSAOps(
        tile_mean=registry.follow("tile_mean", backend, case),
        tile_topk=registry.follow("tile_topk", backend, case),
        block_sparse_attention=main,
        coarse_branch=registry.follow("coarse_branch", backend, case),
        dense_attention=registry.follow("dense_attention", backend, case),
        whole_tiles=case == in_parts or _takes("block_sparse_attention", main.name, case),
    )


def _takes(op: str, name: str, case: Case) -> bool:
    try:
        registry.resolve(op, name, case)
    except BackendUnavailable:
        return False
    return True


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    plan: TilePlan,
    config: VSAConfig,
    *,
    step: int = 0,
    layer: int = 0,
    ops: VSAOps | None = None,
    byte_budget: int | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """One block's attention.

    Args:
        q, k, v: [S, H, D] in the plan's order, after QK norm and rotation. Slices of one fused projection are fine.
        gate: [S, H, D] of the coarse branch, or None for none. It adds its branch even where every tile is kept.
        config: resolved; says how many video tiles are kept at this step and layer, and how prefix tiles take part.
        ops: what `resolve_ops` decided for this run; None decides for this call alone.
        byte_budget: bound on gathered keys and values, for implementations that gather.
        in_place: write the result over q and return q; otherwise nothing given is changed.

    Returns:
        [S, H, D] in q's dtype.

    Raises:
        BackendUnavailable: the configured backend cannot run here.
    """
    ops = ops or resolve_ops(config.backend, Case.of(q, plan.tile_size))
    prefix, P, V = plan.prefix_len, plan.num_prefix_tiles, plan.num_video_tiles
    kept = config.kept_tiles(V, step, layer)
    dense = kept == V
    if dense and gate is None:
        return ops.dense_attention(q, k, v, out=q if in_place else None)

    q_mean = ops.tile_mean(q, plan.offsets, plan.tile_size)
    k_mean = ops.tile_mean(k, plan.offsets, plan.tile_size)
    v_mean = None if gate is None else ops.tile_mean(v, plan.offsets, plan.tile_size)
    out = q if in_place else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dense_rows = len(q) if dense else prefix
    if dense_rows:
        ops.dense_attention(q[:dense_rows], k, v, out=out[:dense_rows])

    for heads in _head_groups(q.shape[1], len(plan.sizes)):
        # prefix queries are dense: only the coarse branch reads their scores
        scores = pooled_scores(q_mean[heads, 0 if gate is not None else P :], k_mean[heads])
        if not dense:
            index, count = ops.tile_topk(scores[:, -V:], P, kept, config.mode)
            offsets = plan.offsets
            if not ops.whole_tiles:
                offsets, (index, count) = plan.part_offsets, plan.expand(index, count)
            ops.block_sparse_attention(
                q[prefix:, heads], k[:, heads], v[:, heads], offsets, index, count,
                out=out[prefix:, heads], byte_budget=byte_budget,
            )
        if gate is not None:
            ops.coarse_branch(out[:, heads], scores, v_mean[heads], gate[:, heads], plan.offsets)
    return out


def _head_groups(num_heads: int, num_tiles: int) -> list[slice]:
    step = max(1, SCORE_BYTES // (4 * num_tiles * num_tiles))
    return [slice(h, min(h + step, num_heads)) for h in range(0, num_heads, step)]
