"""What an adapter costs that is kept beside the weights: one block at full size, with and without.

    python3 bench/increments.py --out DIR

A pair of factors for every projection of a block as files have them: q, k and v apart, and both halves of the
feed-forward's first product. The sum must be that of the merged weight within what bf16 rounds, or nothing is printed.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from _package import environment, package
from block import DEVICE, DTYPE, Block, in_form, milliseconds

PARTS = {"qkv_proj": 3, "fc1": 2}
"""Projections that files adapt in parts."""


def adapted(weights: dict, rank: int) -> dict:
    module = package("fasth3_core.adapters.weight")
    is_projection = package("fasth3_core.weights.fp8").is_projection
    random = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, device=DEVICE, generator=random) * scale).to(DTYPE)

    def with_pairs(name: str, weight):
        parts = PARTS.get(name.split(".")[1], 1)
        rows, columns = weight.shape[0] // parts, weight.shape[1]
        return module.AdaptedWeight(weight, tuple(
            module.Increment(normal(rank, columns, scale=columns**-0.5), normal(rows, rank, scale=0.02), 1.0, i * rows)
            for i in range(parts)
        ))  # fmt: skip

    return {n: with_pairs(n, w) if is_projection(f"blocks.0.{n}") else w for n, w in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()
    env = environment() | ({"commit": args.commit} if args.commit else {})
    block, variants = Block("auto"), {}
    for form in ("bf16", "int8"):
        weights = in_form(form, block.weights)
        variants[form, 0] = weights
        variants |= {(form, rank): adapted(weights, rank) for rank in args.ranks}
    merged = {
        n: w.dequantise(DTYPE) if hasattr(w, "increments") else w for n, w in variants["bf16", args.ranks[0]].items()
    }
    plain, truth, found = (block.added(w) for w in (block.weights, merged, variants["bf16", args.ranks[0]]))
    apart, effect = ((x - truth).norm().item() for x in (found, plain))
    if not apart < 0.25 * effect:
        sys.exit(f"the block with increments is {apart:.3g} from the merged one, which is {effect:.3g} from the base")
    x = block.stream.clone()
    times = milliseconds({key: partial(block.run, x, weights) for key, weights in variants.items()})
    rows = []
    for (form, rank), found in times.items():
        cuts = statistics.quantiles(found, n=5, method="inclusive")
        rows.append(env | {"form": form, "rank": rank, "p20_ms": cuts[0], "p50_ms": statistics.median(found),
                           "p80_ms": cuts[3], "off_of_effect": apart / effect})  # fmt: skip
        print(f"{form:<5} rank {rank:<4} {rows[-1]['p50_ms']:8.3f} ms ({cuts[0]:.3f} to {cuts[3]:.3f})", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "increments.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
