"""Streamed weights beside resident ones, and the plan beside measured peaks, at full size on one GPU.

    python3 bench/offload.py --out DIR

Two random blocks of the released size stand for all of them: each gets its own memory on the device and on the host, so
times and bytes are real. Every streamed run must have the bits of the resident one, or nothing is printed. A capped run
has `set_per_process_memory_fraction` at its budget: what does not fit fails.
"""

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from _package import environment, package

TEXT_TOKENS = 256
MAIN, LONG, LONGEST = (1344, 768, 124), (1344, 768, 243), (1344, 768, 362)
SIZES = ((832, 480, 124), MAIN, LONG, LONGEST)
DEVICE = torch.device("cuda", 0)
PASS_ROWS = 40_960
STAGES = ("plan", "small", "bf16", "buffers", "quantised", "mmap")


class Parts:
    """Weights of a transformer whose blocks share two sets of values, page-locked, under the names of a single file."""

    def __init__(self, form: str) -> None:
        weights, masters = package("fasth3_core.selftest.random_weights"), package("fasth3_core.weights.masters")
        dims = weights.FULL_SIZE | {"num_layers": 2}
        made = weights.random_transformer(**dims, dtype=torch.bfloat16, device=DEVICE)
        if form != "bf16":
            made = {n: quantised(t, form) if n.startswith("blocks.") and is_linear(n) else t for n, t in made.items()}
        self._host = {n: t.to("cpu") for n, t in made.items()}
        self._pool = masters.PinnedPool(DEVICE)
        self._pool.allow(64 << 30)
        self._pool.pin(masters.HostBlock(self._host))  # what two blocks share is locked once

    def model(self, layers: int, dtype: str = "bf16"):
        reading = package("fasth3_core.checkpoint.reading")

        class Source(reading.MemorySource):
            def open(self, device="cpu", on_piece=None):
                return super().open(device)

        canonical = {n: t for n, t in self._host.items() if not n.startswith("blocks.")}
        for i in range(layers):
            own = f"blocks.{i % 2}."
            canonical |= {f"blocks.{i}." + n.removeprefix(own): t for n, t in self._host.items() if n.startswith(own)}
        names = package("fasth3_core.checkpoint.names")
        source = Source(names.from_canonical(canonical, "single-file"))
        plan = names.plan_transformer(source, "single-file")
        config = package("fasth3_core.config").DiTConfig.from_shapes(plan.shapes, None)
        store = package("fasth3_core.weights.store").FileStore(source, plan, config, dtype)
        contract = package("fasth3_core.contracts").CONTRACTS["preview-4"]
        return package("fasth3_core.model.handle").H3Model(config, contract, store, "random weights")


def is_linear(name: str) -> bool:
    return name.endswith(("qkv_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight", "to_gate_compress.weight"))


def quantised(weight: torch.Tensor, form: str):
    weights = package("fasth3_core.checkpoint.quant")
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-8) / (127 if form == "int8" else 448)
    if form == "int8":
        return weights.QuantizedWeight((wide / scale).round().to(torch.int8), scale, "int8_tensorwise", None)
    return weights.QuantizedWeight((wide / scale).to(torch.float8_e4m3fn), scale, "float8_e4m3fn")


def request_of(model, width: int, height: int, frames: int):
    geometry = package("fasth3_core.packing.geometry")
    return package("fasth3_core.sampling.request").Request(
        text_states=torch.randn(1, TEXT_TOKENS, model.config.text_dim, generator=torch.Generator().manual_seed(1)),
        latent_frames=geometry.latent_frames(frames), latent_height=height // 16, latent_width=width // 16,
        audio_latents=geometry.audio_latents(frames), seed=0,
    )  # fmt: skip


def run(model, size, forwards: int, pass_rows: int = PASS_ROWS):
    """(result, seconds of each forward, peak bytes)."""
    schedule = package("fasth3_core.sampling.schedule")
    grids = tuple(schedule.shifted(schedule.uniform_base(forwards + 1), shift) for shift in (12.0, 3.0))
    sample = package("fasth3_core.sampling.loop").sample
    result = sample(model, request_of(model, *size), device=DEVICE, schedules=grids, pass_rows=pass_rows)
    if not torch.isfinite(result.video).all():
        raise SystemExit(f"{size}: the latents are not finite")
    return result, [step.seconds for step in result.report.steps], result.report.memory["peak_bytes"]


def difference(a, b) -> float:
    """0.0 for the same bits of both streams, else the larger relative difference."""
    pairs = ((a.video, b.video), (a.audio, b.audio))
    return max(0.0 if torch.equal(x, y) else ((x - y).norm() / y.norm()).item() for x, y in pairs)


def wanted_of(model, size, forwards: int, pass_rows: int = PASS_ROWS):
    width, height, frames = size
    vsa = package("fasth3_core.sampling.settings").resolve(model).vsa
    store = model.store
    return package("fasth3_core.planning").Wanted(
        width=width, height=height, frames=frames, text_tokens=TEXT_TOKENS, forwards=forwards, config=model.config,
        vsa=vsa, sizes=store.sizes(DEVICE), element_size=2, dequantised=store.widened_bytes(), fp8=store.fp8,
        pass_rows=pass_rows,
    )


def compare_plan(model, cases) -> list[dict]:
    """A row per (size, tokens a pass), the model resident. Several of one size are compared with the first of it."""
    plan, rows, first = package("fasth3_core.planning").plan, [], {}
    for size, pass_rows in cases:
        empty()
        result, seconds, peak = run(model, size, 1, pass_rows)
        reserved = torch.cuda.max_memory_reserved()
        planned = plan(wanted_of(model, size, 1, pass_rows))
        beside = peak - planned.weight_bytes
        rows.append({
            "size": "x".join(map(str, size)), "pass_rows": pass_rows, "layers": model.config.num_layers,
            "measured_gib": gib(peak), "planned_gib": gib(planned.peak_bytes),
            "activations_gib": gib(beside), "planned_activations_gib": gib(planned.run.peak),
            "reserved_gib": gib(reserved), "forward_s": round(seconds[0], 3),
            "from_first": difference(result, first.setdefault(size, result)),
            "parts_gib": {k: gib(v) for k, v in planned.run.to_dict().items()},
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def streamed(
    model, expected, resident_s: float, budget_gib: float, name: str, *, size=MAIN, forwards: int = 2,
    pinned: bool = True, policy: str = "stream", folder: Path | None = None, repeats: int = 1,
) -> dict:  # fmt: skip
    placement, plan = package("fasth3_core.weights.placement"), package("fasth3_core.planning").plan
    # a virtual machine may have little memory until it is asked for more
    room = placement.Room(
        device=int(budget_gib * 2**30), host=120 << 30, pinnable=(100 << 30) if pinned else 0, folder=folder,
    )
    wanted = wanted_of(model, size, forwards)
    wanted, chosen = package("fasth3_core.planning_fit").fit(wanted, placement.Offload(policy=policy), room)
    started = time.perf_counter()
    model.store.place(chosen)
    empty()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(budget_gib * 2**30 / total, DEVICE)
    try:
        torch.cuda.reset_peak_memory_stats()
        model.store.materialise(DEVICE)
        loaded = time.perf_counter() - started
        seconds = []
        for _ in range(repeats):
            result, steps, peak = run(model, size, forwards, wanted.pass_rows)
            apart = difference(result, expected)
            if apart > 0 and wanted.pass_rows == PASS_ROWS:
                raise SystemExit(f"{name}: a streamed run differs from the resident one by {apart:.1e}")
            seconds += steps
        reserved = torch.cuda.max_memory_reserved()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    return {
        "run": name, "size": "x".join(map(str, size)), "budget_gib": budget_gib, "layers": model.config.num_layers,
        "pass_rows": wanted.pass_rows, "from_resident": apart, "peak_gib": gib(peak), "reserved_gib": gib(reserved),
        "planned_gib": gib(plan(wanted, chosen).peak_bytes), "forward_s": [round(s, 3) for s in seconds],
        "resident_forward_s": round(resident_s, 3), "slowdown": round(min(seconds) / resident_s, 4),
        "load_s": round(loaded, 1), **result.report.weights,
    }  # fmt: skip


def empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def gib(nbytes: float) -> float:
    return round(nbytes / 2**30, 2)


def resident_run(model, name: str, size=MAIN, forwards: int = 2, warm: bool = True):
    model.store.place(package("fasth3_core.weights.placement").RESIDENT)
    started = time.perf_counter()
    model.store.materialise(DEVICE)
    loaded = time.perf_counter() - started
    if warm:
        run(model, size, 1)  # loads kernels
    result, seconds, peak = run(model, size, forwards)
    row = {"run": name, "size": "x".join(map(str, size)), "layers": model.config.num_layers, "peak_gib": gib(peak),
           "load_s": round(loaded, 1), "forward_s": [round(s, 3) for s in seconds]}  # fmt: skip
    return result, min(seconds), row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--quantised-layers", type=int, default=30, help="of the int8 and fp8 rows")
    parser.add_argument("--few-layers", type=int, default=8, help="of the rows about activations alone")
    parser.add_argument("--only", nargs="*", default=STAGES, choices=STAGES)
    parser.add_argument("--mmap-folder", type=Path, help="of the mapped file; default: the system's for such files")
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    record = {**environment(), "rows": [], "plan": []}
    if args.commit:
        record["commit"] = args.commit

    def keep(row: dict) -> None:
        record["rows"].append(row)
        print(json.dumps(row), flush=True)
        (args.out / "offload.json").write_text(json.dumps(record, indent=1))

    parts = Parts("bf16")
    few = parts.model(args.few_layers)
    if "plan" in args.only:
        few.store.materialise(DEVICE)
        run(few, MAIN, 1)
        cases = [(size, PASS_ROWS) for size in SIZES]
        cases += [(MAIN, PASS_ROWS // 2), (MAIN, PASS_ROWS // 4), (LONGEST, 1 << 20), (LONGEST, PASS_ROWS // 2)]
        record["plan"] = compare_plan(few, cases)
    if "small" in args.only:  # what the smallest cards have room for
        for size, budget in ((MAIN, 6.0), (LONG, 10.0), (LONGEST, 12.0)):
            expected, resident_s, _ = resident_run(few, "", size, forwards=1, warm=False)
            few.store.release()
            keep(streamed(few, expected, resident_s, budget, f"bf16 stream {budget:g} GiB", size=size, forwards=1))
    few.store.forget()
    del few
    empty()
    if "bf16" in args.only:
        full = parts.model(args.layers)
        expected, resident_s, row = resident_run(full, "bf16 resident")
        whole = full, expected, resident_s
        keep(row)
        for budget, repeats in ((12.0, 2), (22.0, 1)):
            name = f"bf16 stream {budget:g} GiB, page-locked"
            keep(streamed(*whole, budget, name, repeats=repeats))
        full.store.forget()
        if "buffers" in args.only:
            keep(streamed(*whole, 12.0, "bf16 stream 12 GiB, through buffers", pinned=False))
            full.store.forget()
    if "quantised" in args.only:
        for form in ("fp8 at load", "int8", "float8 file"):
            if form != "fp8 at load":
                parts = Parts(form)
            model = parts.model(args.quantised_layers, "fp8" if form == "fp8 at load" else "bf16")
            expected, resident_s, row = resident_run(model, f"{form} resident")
            keep(row)
            keep(streamed(model, expected, resident_s, 12.0, f"{form} stream 12 GiB, page-locked"))
            model.store.forget()
            empty()
    if "bf16" in args.only and "mmap" in args.only:
        keep(streamed(*whole, 12.0, "bf16 mmap 12 GiB, through buffers", policy="mmap", folder=args.mmap_folder))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
