"""Our sparse op beside FastVideo's, on the same tensors in the same process, in turns.

    PYTHONPATH=... python3 bench/beside_fastvideo.py --out DIR

Needs FastVideo's packages `fastvideo` and `fastvideo_kernel` importable (their Triton kernels need no build) and a GPU.
768 x 1344, 124 and 362 frames, 56 heads x 128, bf16, tile 64, sparsity 0.9, with gate. Prints nothing but the fault,
and exits 1, when the two ops do not compute the same.
"""

import argparse
import gc
import json
import os
import statistics
from pathlib import Path

os.environ["FASTVIDEO_VSA_TRITON"] = "1"  # what runs there without its compiled extension

import torch
from _package import environment
from vsa_op import GPU_CASES, SPARSITY, TILE, Inputs, measure

AGREE = 8e-3
"""Median relative difference of rows: twice what either loses to bf16. Single rows may keep another tile on a tie."""
ROUNDS = 3


class Peer:
    """FastVideo's VSA-H3 as its model calls it: q, k, v and gate stacked in packed order, tiled, attended, untiled."""

    def __init__(self, case: Inputs, segments: tuple[int, ...], grid: tuple[int, int, int]) -> None:
        from fastvideo.attention.backends import video_sparse_attn_h3 as h3
        from fastvideo_kernel import block_sparse_attn_from_indices
        from fastvideo_kernel.triton_kernels.index import map_to_index

        self.metadata = h3.MiniMaxH3VSAMetadataBuilder().build(
            current_timestep=0, raw_latent_shape=(grid[0], 2 * grid[1], 2 * grid[2]), patch_size=(1, 2, 2),
            VSA_sparsity=SPARSITY, prefix_segments=segments, device=case.device, tile_size=TILE,
        )  # fmt: skip
        heads, head_dim = case.q.shape[1:]
        self.impl = h3.MiniMaxH3VSAImpl(heads, head_dim, causal=False, softmax_scale=head_dim**-0.5, prefix="blocks.0")
        self.stacked = torch.stack([x[case.plan.inverse] for x in (case.q, case.k, case.v, case.gate)])
        q, k, v, _ = self.impl.preprocess_qkv(self.stacked, self.metadata)
        mask = torch.zeros(heads, *[len(case.plan.sizes)] * 2, dtype=torch.bool, device=case.device)
        P = case.plan.num_prefix_tiles
        mask[:, :P] = True
        mask[:, P:].scatter_(2, case.index.long(), True)
        lists = map_to_index(mask[None])
        padded = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
        self.kernel = lambda: block_sparse_attn_from_indices(*padded, *lists, self.metadata.variable_block_sizes)[0]

    def whole(self) -> torch.Tensor:
        """[S, H, D] in packed order."""
        q, k, v, gate = self.impl.preprocess_qkv(self.stacked, self.metadata)[:, None]
        return self.impl.postprocess_output(self.impl.forward(q, k, v, gate, self.metadata), self.metadata)[0]


def differences(case: Inputs, peer: Peer) -> list[float]:
    """Median over rows of |ours - theirs| / |theirs|, and the same for ours times 1.01."""
    ours, theirs = case.whole(case.gate)[case.plan.inverse].flatten(1), peer.whole().flatten(1)
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        raise SystemExit("an output is not finite")
    norms = torch.linalg.vector_norm(theirs, dim=1, dtype=torch.float32)
    apart = (torch.linalg.vector_norm(scale * ours.float() - theirs.float(), dim=1) for scale in (1.0, 1.01))
    return [(x / norms).median().item() for x in apart]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--data", nargs="*", default=["random"], choices=["random", "smooth"])
    parser.add_argument("--case", nargs="*", default=list(GPU_CASES), choices=list(GPU_CASES))
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()
    env, device, rows = environment() | ({"commit": args.commit} if args.commit else {}), torch.device("cuda"), []
    for name, data in ((n, d) for n in args.case for d in args.data):
        torch.manual_seed(0)
        segments, grid, heads = GPU_CASES[name]
        case = Inputs(segments, grid, heads, device, torch.bfloat16, args.backend, data)
        peer = Peer(case, segments, grid)
        apart, scaled = differences(case, peer)
        if not apart <= AGREE < scaled:
            raise SystemExit(f"{name}, {data}: median row differs by {apart:.2e}, at most {AGREE:.0e} was expected")
        ours = case.ops.block_sparse_attention.name
        pairs = {
            ("whole op with gate", ours): lambda case=case: case.whole(case.gate),
            ("whole op with gate", "fastvideo"): peer.whole,
            ("block_sparse_attention", ours): case.sparse,
            ("block_sparse_attention and prefix rows", "fastvideo"): peer.kernel,
        }
        print(f"{name}, {data} data: ours and FastVideo's differ by {apart:.1e} in the median row; {env['gpu']}")
        readings = {key: [] for key in pairs}
        for _ in range(ROUNDS):
            for key, function in pairs.items():
                readings[key].append(measure(function, device, hot=True))
        for (what, who), found in readings.items():
            row = {"p50_ms": statistics.median(r["p50_ms"] for r in found), "extra_gib": found[-1]["extra_gib"]}
            row |= {"p20_ms": min(r["p20_ms"] for r in found), "p80_ms": max(r["p80_ms"] for r in found)}
            case_row = {"case": name, "data": data, "what": what, "who": who, "load": "hot", "median_difference": apart}
            rows.append(env | case_row | row)
            print(f"  {what:<40} {who:<10} {row['p50_ms']:8.2f} ms {row['extra_gib']:6.2f} GiB", flush=True)
        del case, peer, pairs, function
        gc.collect()
        torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "beside_fastvideo_cuda.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
