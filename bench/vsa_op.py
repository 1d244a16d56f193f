"""The sparse attention op: checked first, then timed whole and in parts beside dense attention in the same process.

    python3 bench/vsa_op.py --backend auto triton eager --data random smooth --out DIR

On a GPU: 768 x 1344, 124 and 362 frames, 56 heads x 128, bf16. On a CPU: a small grid in fp32. Sparsity 0.9, tile 64.
Prints nothing but the fault, and exits 1, when a sampled row is wrong.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from _package import environment, package
from torch.nn.attention import SDPBackend, sdpa_kernel

vsa = package("fasth3_core.vsa.attention")
tile_plan = package("fasth3_core.vsa.tiles").tile_plan
VSAConfig = package("fasth3_core.config").VSAConfig
Case = package("kernels.device").Case

GPU_CASES = {"124f": ((256, 0, 414), (37, 24, 42), 56), "362f": ((256, 0, 1206), (107, 24, 42), 56)}
CPU_CASES = {"small": ((40, 0, 66), (10, 16, 28), 4)}
HEAD_DIM, TILE, SPARSITY = 128, 64, 0.9
SECONDS, MOST_RUNS = 1.5, 20
"""A row is repeated until one of them is used up, at least three times."""
LOAD_SECONDS = 1.0
"""Of launches before a row that is read hot: the clock falls under load."""
HOT = ", hot"


def smooth_waves(plan, heads: int, device: torch.device) -> torch.Tensor:
    """[video tokens, 3, heads, channels / 8], one value a tile, that vary slowly over the grid as pictures do."""
    t, h, w = (math.ceil(n / 4) for n in plan.grid)
    wave = torch.randn(1, 3 * heads * HEAD_DIM // 8, t, h, w, device=device)
    for _ in range(2):
        wave = F.avg_pool3d(wave, 3, 1, 1, count_include_pad=False)
    tile = torch.repeat_interleave(plan.tile_sizes()[plan.num_prefix_tiles :])
    return 2 * (wave / wave.std())[0].flatten(1).T.reshape(-1, 3, heads, HEAD_DIM // 8)[tile]


class Inputs:
    """One case: fused random inputs in tile order, and the lists that they lead to."""

    def __init__(self, segments, grid, heads: int, device: torch.device, dtype: torch.dtype, backend: str, data: str):
        self.device = device
        self.plan = tile_plan(segments, grid, TILE, device)
        self.config = VSAConfig(keep_rule="sparsity", sparsity=SPARSITY, tile_size=TILE, backend=backend)
        self.kept = self.config.kept_tiles(self.plan.num_video_tiles)
        shape = (self.plan.num_tokens, 3, heads, HEAD_DIM)
        qkv = torch.randn(shape, device=device, dtype=dtype)
        if data == "smooth":
            qkv[self.plan.prefix_len :, ..., : HEAD_DIM // 8] = smooth_waves(self.plan, heads, device).to(dtype)
        self.q, self.k, self.v = qkv.unbind(1)
        self.gate = torch.randn_like(self.q)
        self.ops = vsa.resolve_ops(backend, Case.of(self.q, TILE))
        self.means = [self.ops.tile_mean(x, self.plan.offsets, TILE) for x in (self.q, self.k, self.v)]
        self.scores = vsa.pooled_scores(self.means[0], self.means[1])
        self.index, self.count = self.topk()

    def topk(self):
        V = self.plan.num_video_tiles
        return self.ops.tile_topk(self.scores[:, -V:], self.plan.num_prefix_tiles, self.kept, "exempt")

    def whole(self, gate=None, budget=None):
        return vsa.attention(
            self.q, self.k, self.v, gate, self.plan, self.config, ops=self.ops, byte_budget=budget
        )

    def sparse(self):
        p = self.plan
        return self.ops.block_sparse_attention(
            self.q[p.prefix_len :], self.k, self.v, p.offsets, self.index, self.count
        )

    def dense(self):
        return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (self.q, self.k, self.v)))

    def valid_flop(self) -> float:
        """Of the video rows' attention, counting listed tokens only."""
        sizes = torch.tensor(self.plan.sizes, device=self.device)
        listed = sizes[self.index.long().clamp(min=0)] * (self.index >= 0)
        return float((listed.sum(-1) * sizes[self.plan.num_prefix_tiles :]).sum()) * 4 * HEAD_DIM


def check(case: Inputs) -> list[str]:
    """Faults of the whole op, on sampled heads and tiles, against its definition in fp32."""
    plan, faults = case.plan, []
    P, bounds = plan.num_prefix_tiles, plan.offsets.tolist()
    plain_out, gated_out = case.whole(), case.whole(case.gate)
    if not (plain_out.isfinite().all() and gated_out.isfinite().all()):
        return ["output is not finite"]
    heads = sorted({0, case.q.shape[1] // 2, case.q.shape[1] - 1})
    tiles = sorted({0, P - 1, P, P + 5, (P + len(plan.sizes)) // 2, len(plan.sizes) - 1})
    for h in heads:
        for n in tiles:
            rows = slice(bounds[n], bounds[n + 1])
            if n < P:
                tokens = slice(None)
            else:
                row = case.scores[h, n, P:].tolist()
                best = sorted(range(len(row)), key=lambda j: (-row[j], j))[: case.kept]
                listed = [*range(P), *(P + j for j in sorted(best))]
                if case.index[h, n - P].tolist() != listed:
                    faults.append(f"head {h} tile {n}: other tiles than the best-scoring ones")
                tokens = [t for j in listed for t in range(bounds[j], bounds[j + 1])]
            q, k, v = case.q[rows, h], case.k[tokens, h], case.v[tokens, h]
            exact = (q.float() @ k.float().T / HEAD_DIM**0.5).softmax(-1) @ v.float()
            rounded = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]
            coarse = case.scores[h, n].softmax(-1) @ case.means[2][h]
            branch = coarse * case.gate[rows, h].float()
            bound = max(2 * _error(rounded, exact), 1e-5)
            for what, out, expected in (("", plain_out, exact), (" with gate", gated_out, exact + branch)):
                error = _error(out[rows, h], expected)
                if not error <= bound or _error(out[rows, h].float() * 1.01, expected) <= bound:
                    faults.append(f"head {h} tile {n}{what}: relative error {error:.2e}, bound {bound:.2e}")
    return faults


def _error(out, exact) -> float:
    return ((out.float() - exact).norm() / exact.norm()).item()


def rows_of(case: Inputs, budgets: list[int], beside: bool):
    """(what, function, floating-point operations or None) of everything that is timed; dense attention if `beside`."""
    plan, q, k, v, gate = case.plan, case.q, case.k, case.v, case.gate
    out = torch.empty_like(q)
    yield "whole op with gate", lambda: case.whole(gate), None
    yield "whole op", case.whole, None
    for mib in budgets:
        yield f"whole op with gate, {mib} MiB", lambda mib=mib: case.whole(gate, mib << 20), None
    yield "  block_sparse_attention", case.sparse, case.valid_flop()
    if case.device.type == "cuda":
        yield f"  block_sparse_attention{HOT}", case.sparse, case.valid_flop()
    yield "  tile_mean, one of three", lambda: case.ops.tile_mean(q, plan.offsets, TILE), None
    yield "  pooled scores", lambda: vsa.pooled_scores(*case.means[:2]), None
    yield "  tile_topk", case.topk, None
    yield "  coarse_branch", lambda: case.ops.coarse_branch(out, case.scores, case.means[2], gate, plan.offsets), None
    yield "  dense prefix rows", lambda: case.ops.dense_attention(q[: plan.prefix_len], k, v), None
    if not beside:
        return
    flop = 4.0 * HEAD_DIM * q.shape[1] * plan.num_tokens**2
    yield "dense attention, torch's choice", case.dense, flop
    if case.device.type == "cuda":
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

            def forced(backend=backend):
                with sdpa_kernel(backend):
                    return case.dense()

            yield f"dense attention, {backend.name.lower()}", forced, flop


def measure(function, device: torch.device, hot: bool) -> dict:
    """Milliseconds (p20, p50, p80) after a warm-up, a second of it if `hot`, and peak memory beyond what was held."""
    cuda = device.type == "cuda"
    function()
    started = time.perf_counter()
    while hot and time.perf_counter() - started < LOAD_SECONDS:
        function()
        torch.cuda.synchronize()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    times, started = [], time.perf_counter()
    while len(times) < 3 or (len(times) < MOST_RUNS and time.perf_counter() - started < SECONDS):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    row = {"p20_ms": cuts[0], "p50_ms": statistics.median(times), "p80_ms": cuts[3], "runs": len(times)}
    if cuda:
        row["extra_gib"] = (torch.cuda.max_memory_allocated() - held) / 2**30
    return {key: round(value, 4) for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder for vsa_op_DEVICE.json")
    parser.add_argument("--backend", nargs="*", default=["auto"])
    parser.add_argument("--data", nargs="*", default=["random"], choices=["random", "smooth"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-mib", type=int, nargs="*", default=[], help="also with these byte budgets")
    parser.add_argument("--case", nargs="*", help="some of the cases, by name")
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()
    device = torch.device(args.device)
    cases, dtype = (GPU_CASES, torch.bfloat16) if device.type == "cuda" else (CPU_CASES, torch.float32)
    env = environment() | ({"commit": args.commit} if args.commit else {})
    env |= {} if device.type == "cuda" else {"gpu": "none", "threads": str(torch.get_num_threads())}
    rows = []
    with torch.inference_mode():
        for name, data, backend in itertools.product(args.case or cases, args.data, args.backend):
            torch.manual_seed(0)
            case = Inputs(*cases[name], device, dtype, backend, data)
            if faults := check(case):
                raise SystemExit("\n".join(f"{name}: {fault}" for fault in faults))
            plan = case.plan
            print(
                f"{name}: {plan.num_tokens} tokens, {plan.num_prefix_tiles} + {plan.num_video_tiles} tiles, "
                f"{case.kept} kept, {data} data, backend {case.ops.block_sparse_attention.name}, {env['gpu']}"
            )
            shape = {
                "case": name, "tokens": plan.num_tokens, "heads": case.q.shape[1], "head_dim": HEAD_DIM, "tile": TILE,
                "kept": case.kept, "dtype": str(dtype), "data": data, "backend": case.ops.block_sparse_attention.name,
            }
            first = (data, backend) == (args.data[0], args.backend[0])
            for what, function, flop in rows_of(case, args.budget_mib, beside=first):
                row = measure(function, device, what.endswith(HOT))
                if flop:
                    row["tflops"] = round(flop / row["p50_ms"] / 1e9, 2)
                rows.append(env | shape | {"what": what.strip()} | row)
                rate = f"{row['tflops']:8.2f} TFLOP/s" if flop else " " * 16
                memory = f"{row['extra_gib']:6.2f} GiB" if "extra_gib" in row else ""
                print(f"  {what:<36} {row['p50_ms']:10.3f} ms {rate} {memory}", flush=True)
            del case, function
            if device.type == "cuda":
                torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"vsa_op_{device.type}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
