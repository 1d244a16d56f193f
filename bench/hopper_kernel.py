"""The Hopper path of block_sparse_attention at full size: checked first, then timed beside the others.

    python3 bench/hopper_kernel.py --frames 124 --out DIR

768 x 1344 with 256 text tokens, 56 heads of 128, bf16, sparsity 0.9, tile 64. Cool: median launch after a rest. Hot:
mean launch after `--load` seconds of it. Backends take turns, because the clock falls under load. TFLOP/s count pairs
of real tokens only. Nothing is printed if a result is wrong.
"""

import argparse
import json
import math
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
from _package import environment, package

HEADS, DIM, TEXT, SPARSITY = 56, 128, 256, 0.9
GRID = (24, 42)
DEVICE = torch.device("cuda")
MOST_ERROR = 5e-3
"""bf16 inputs and probabilities lose 2.3e-3."""


def geometry(frames: int):
    packing = package("fasth3_core.packing.geometry")
    audio = 2 * packing.audio_latents(frames)
    grid = (packing.latent_frames(frames), *GRID)
    return package("fasth3_core.vsa.tiles").tile_plan((TEXT, audio), grid, 64, DEVICE)


def tensors(plan, data: str):
    """q, k, v as slices of one projection. "smooth": a token resembles its neighbours, as a picture's do."""
    S = plan.num_tokens
    qkv = torch.randn(S, 3, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    if data == "smooth":
        P, rows = plan.num_prefix_tiles, plan.num_tokens - plan.prefix_len
        tile = torch.repeat_interleave(plan.tile_sizes()[P:], output_size=rows)
        t, h, w = (math.ceil(n / 4) for n in plan.grid)
        wave = torch.randn(1, 3 * HEADS * DIM // 8, t, h, w, device=DEVICE)
        for _ in range(2):
            wave = torch.nn.functional.avg_pool3d(wave, 3, 1, 1, count_include_pad=False)
        wave = (wave / wave.std())[0].flatten(1).T.reshape(-1, 3, HEADS, DIM // 8)[tile]
        qkv[plan.prefix_len :, ..., : DIM // 8] = wave.to(torch.bfloat16) * 2
    return qkv.unbind(1)


def lists(plan, q, k, chosen: str):
    """Index and count. "scores": as a run chooses them, which on random data prefers ragged tiles: fewer tokens average
    to greater means. "random": every tile alike.
    """
    kept = max(1, math.ceil((1 - SPARSITY) * plan.num_video_tiles))
    tile = torch.repeat_interleave(plan.tile_sizes(), output_size=plan.num_tokens)
    P, V = plan.num_prefix_tiles, plan.num_video_tiles
    index = []
    for h in range(HEADS):
        means = [torch.zeros(P + V, DIM, device=DEVICE).index_add_(0, tile, x[:, h].float()) for x in (q, k)]
        means = [m / plan.tile_sizes()[:, None] for m in means]
        scores = means[0][P:] @ means[1][P:].T if chosen == "scores" else torch.rand(V, V, device=DEVICE)
        best = scores.topk(kept).indices.sort().values + P
        index.append(torch.cat([torch.arange(P, device=DEVICE).expand(V, P), best], dim=1))
    index = torch.stack(index).int()
    return index, torch.full(index.shape[:2], index.shape[2], dtype=torch.int32, device=DEVICE)


def flops(plan, index) -> float:
    sizes = plan.tile_sizes().double()
    keys = sizes[index.long()].sum(-1)
    return 4 * DIM * (keys * sizes[plan.num_prefix_tiles :]).sum().item()


def worst_error(plan, args, out) -> float:
    """Of some lists, first and last and ragged query tiles among them, against fp32."""
    q, k, v, offsets, index, count = args
    P, V = plan.num_prefix_tiles, plan.num_video_tiles
    ragged = [i for i in range(V) if plan.sizes[P + i] < 64]
    bounds = offsets.tolist()
    worst = 0.0
    for n, i in enumerate([0, V - 1, V // 2, *ragged[:: max(1, len(ragged) // 5)]]):
        h = n * 13 % HEADS
        tokens = torch.cat([torch.arange(bounds[t], bounds[t + 1]) for t in index[h, i, : count[h, i]].tolist()])
        rows = slice(bounds[P + i] - bounds[P], bounds[P + i + 1] - bounds[P])
        logits = q[rows, h].double() @ k[tokens.to(DEVICE), h].double().T / DIM**0.5
        expected = logits.softmax(-1) @ v[tokens.to(DEVICE), h].double()
        worst = max(worst, ((out[rows, h].double() - expected).norm() / expected.norm()).item())
    return worst


def launches(function, seconds: float) -> int:
    """Keep the device busy."""
    started, n = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for _ in range(5):
            function()
        torch.cuda.synchronize()
        n += 5
    return n


def timed(function, repeats: int) -> list[float]:
    """Milliseconds of each launch."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def measure(functions: dict, load: float, rounds: int) -> dict[str, dict[str, float]]:
    """{name: cool and hot milliseconds}, the functions taking turns."""
    samples = {name: {"cool": [], "hot": []} for name in functions}
    for function in functions.values():
        timed(function, 2)
    for _ in range(rounds):
        for name, function in functions.items():
            time.sleep(0.4)
            samples[name]["cool"] += timed(function, 7)[2:]
        for name, function in functions.items():
            launches(function, load)
            samples[name]["hot"].append(statistics.fmean(timed(function, 15)))
    return {name: {k: statistics.median(v) for k, v in row.items()} for name, row in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=124)
    parser.add_argument("--data", choices=("random", "smooth"), default="random")
    parser.add_argument("--lists", choices=("random", "scores"), default="scores")
    parser.add_argument("--backends", nargs="+", default=["hopper", "triton"])
    parser.add_argument("--load", type=float, default=1.0, help="seconds of load before a hot reading")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="time the whole operation of a block too")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()

    registry, case = package("kernels.registry"), package("kernels.device").Case
    plan = geometry(args.frames)
    q, k, v = tensors(plan, args.data)
    index, count = lists(plan, q, k, args.lists)
    call = (q[plan.prefix_len :], k, v, plan.offsets, index, count)
    work = flops(plan, index)

    rows, functions = [], {}
    for name in args.backends:
        run = registry.resolve("block_sparse_attention", name, case.of(q))
        error = worst_error(plan, call, run(*call))
        if not error < MOST_ERROR:
            raise SystemExit(f"{name}: relative error {error:.2e}, expected below {MOST_ERROR}")
        rows.append({"backend": name, "error": error})
        functions[name] = lambda run=run: run(*call)
    if args.whole:
        attention, config = package("fasth3_core.vsa.attention"), package("fasth3_core.config").VSAConfig
        for name in args.backends:
            settings = config(keep_rule="sparsity", sparsity=SPARSITY, tile_size=64, backend=name)
            ops = attention.resolve_ops(name, case.of(q, 64))
            functions[f"{name}, whole"] = lambda s=settings, o=ops: attention.attention(q, k, v, None, plan, s, ops=o)
            rows.append({"backend": f"{name}, whole"})

    for row in rows:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        functions[row["backend"]]()
        row["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    times = measure(functions, args.load, args.rounds)
    for row in rows:
        for state, ms in times[row["backend"]].items():
            row |= {f"{state}_ms": ms, f"{state}_tflops": work / ms / 1e9}
    report = {**environment(), "frames": args.frames, "data": args.data, "lists": args.lists, "tflop": work / 1e12}
    if args.commit:
        report["commit"] = args.commit
    print(json.dumps(report))
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"hopper_kernel_{args.frames}_{args.data}_{args.lists}.json"
    (args.out / name).write_text(json.dumps(report | {"rows": rows}, indent=1))
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
