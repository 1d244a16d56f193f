"""The sparse op and the int8 linear against recorded truth."""

from collections.abc import Iterator

import torch

from ...kernels import registry
from ...kernels.device import Case
from ...kernels.int8_linear import dequantise_int8, int8_linear
from ...kernels.registry import BackendUnavailable
from ..config import PATCH, VSAConfig
from ..vsa.attention import attention, resolve_ops
from ..vsa.tiles import tile_plan
from .golden import Golden, Row, Target
from .plain import plain_vsa


def vsa_backends(target: Target) -> tuple[str, ...]:
    return target.backends or registry.names("block_sparse_attention")


def verify_vsa_op(golden: Golden, target: Target) -> Iterator[Row]:
    for i, meta in enumerate(golden.meta["cases"]):
        t, h, w = meta["latent_grid"]
        plan = tile_plan(tuple(meta["prefix_segments"]), (t, h // PATCH, w // PATCH), meta["tile_size"], target.device)
        case = f"{i} {'x'.join(map(str, plan.grid))} tile {plan.tile_size} s={meta['sparsity']} {meta['mode']}"
        yield target.row(golden, f"{case} sizes", "mismatches", plan.tile_sizes(), golden.tensor(f"{i}.tile_sizes"), 0)
        recorded = golden.tensor(f"{i}.untile_index")
        yield target.row(golden, f"{case} untile", "mismatches", plan.untile_index(), recorded, 0)
        config = VSAConfig(
            keep_rule="sparsity", sparsity=meta["sparsity"], tile_size=meta["tile_size"], mode=meta["mode"]
        )
        # raster order [1, S, H, D] -> tile order [S, H, D]
        q, k, v = (golden.tensor(f"{i}.{name}")[0].to(target.device, target.dtype)[plan.order] for name in "qkv")
        gate = golden.optional(f"{i}.gate")
        gate = None if gate is None else gate[0].to(target.device, target.dtype)[plan.order]
        truth = golden.tensor(f"{i}.out")[0]
        plain = None if target.exact else plain_vsa(q, k, v, gate, plan, config)[plan.inverse]
        for backend in vsa_backends(target):
            try:
                ops = resolve_ops(backend, Case.of(q, plan.tile_size))
            except BackendUnavailable as error:
                yield target.unavailable(golden, case, backend, str(error))
                continue
            out = attention(q, k, v, gate, plan, config, ops=ops)[plan.inverse]
            yield target.row(golden, case, "max abs", out, truth, 3e-6, backend=backend, plain=plain)


def verify_int8_linear(golden: Golden, target: Target) -> Iterator[Row]:
    for i, meta in enumerate(golden.meta["cases"]):
        case = f"{i} {meta['n']}x{meta['k']}{' convrot' if meta['convrot'] else ''}"
        group = meta["group"] if meta["convrot"] else None
        weight, scale = (golden.tensor(f"{i}.{name}").to(target.device) for name in ("weight", "weight_scale"))
        x = golden.tensor(f"{i}.x").to(target.device, target.dtype)
        dense = dequantise_int8(weight, scale, group, torch.float32)
        yield target.row(golden, f"{case} weight", "max abs", dense, golden.tensor(f"{i}.dequantized"), 1e-6)
        plain = None if target.exact else torch.nn.functional.linear(x, dense.to(target.dtype))
        for backend in registry.names("int8_linear"):
            try:
                y = int8_linear(x, weight, scale, group=group, backend=backend)
            except BackendUnavailable as error:
                yield target.unavailable(golden, case, backend, str(error))
                continue
            yield target.row(golden, case, "max abs", y, golden.tensor(f"{i}.y"), 1e-5, backend=backend, plain=plain)
