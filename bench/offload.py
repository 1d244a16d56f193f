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
SIZES = ((832, 480, 124), (1344, 768, 56), (1344, 768, 124), (1344, 768, 243))
MAIN = (1344, 768, 124)
DEVICE = torch.device("cuda", 0)


def source_of(layers: int, form: str):
    """A whole transformer in memory under the names of a single file, whose blocks share two sets of values."""
    weights = package("fasth3_core.selftest.random_weights")
    names = package("fasth3_core.checkpoint.names")
    reading = package("fasth3_core.checkpoint.reading")
    dims = weights.FULL_SIZE | {"num_layers": 2}
    made = weights.random_transformer(**dims, dtype=torch.bfloat16, device=DEVICE)
    if form != "bf16":
        made = {n: quantised(t, form) if n.startswith("blocks.") and is_linear(n) else t for n, t in made.items()}
    host = {n: t.to("cpu") for n, t in made.items()}
    canonical = {n: t for n, t in host.items() if not n.startswith("blocks.")}
    for i in range(layers):
        own = f"blocks.{i % 2}."
        canonical |= {f"blocks.{i}." + n.removeprefix(own): t for n, t in host.items() if n.startswith(own)}

    class Source(reading.MemorySource):
        def open(self, device="cpu", on_piece=None):
            return super().open(device)

    stored = names.from_canonical(canonical, "single-file")
    pool = package("fasth3_core.weights.masters").PinnedPool(DEVICE)
    pool.allow(64 << 30)
    pool.pin(package("fasth3_core.weights.masters").HostBlock(host))  # what two blocks share is locked once
    source = Source(stored)
    source.pool = pool
    return source


def is_linear(name: str) -> bool:
    return name.endswith(("qkv_proj.weight", "out_proj.weight", "fc1.weight", "fc2.weight", "to_gate_compress.weight"))


def quantised(weight: torch.Tensor, form: str):
    weights = package("fasth3_core.checkpoint.quant")
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-8) / (127 if form == "int8" else 448)
    if form == "int8":
        return weights.QuantizedWeight((wide / scale).round().to(torch.int8), scale, "int8_tensorwise", None)
    return weights.QuantizedWeight((wide / scale).to(torch.float8_e4m3fn), scale, "float8_e4m3fn")


def model_of(source):
    plan = package("fasth3_core.checkpoint.names").plan_transformer(source, "single-file")
    config = package("fasth3_core.config").DiTConfig.from_shapes(plan.shapes, None)
    store = package("fasth3_core.weights.store").FileStore(source, plan, config, "bf16")
    contract = package("fasth3_core.contracts").CONTRACTS["preview-4"]
    return package("fasth3_core.model.handle").H3Model(config, contract, store, "random weights")


def request_of(model, width: int, height: int, frames: int):
    geometry = package("fasth3_core.packing.geometry")
    return package("fasth3_core.sampling.request").Request(
        text_states=torch.randn(1, TEXT_TOKENS, model.config.text_dim, generator=torch.Generator().manual_seed(1)),
        latent_frames=geometry.latent_frames(frames), latent_height=height // 16, latent_width=width // 16,
        audio_latents=geometry.audio_latents(frames), seed=0,
    )  # fmt: skip


def run(model, size, forwards: int):
    """(result, seconds of each forward, peak bytes)."""
    schedule = package("fasth3_core.sampling.schedule")
    grids = tuple(schedule.shifted(schedule.uniform_base(forwards + 1), shift) for shift in (12.0, 3.0))
    sample = package("fasth3_core.sampling.loop").sample
    result = sample(model, request_of(model, *size), device=DEVICE, schedules=grids)
    if not torch.isfinite(result.video).all():
        raise SystemExit(f"{size}: the latents are not finite")
    return result, [step.seconds for step in result.report.steps], result.report.memory["peak_bytes"]


def wanted_of(model, size, forwards: int):
    width, height, frames = size
    vsa = package("fasth3_core.sampling.settings").resolve(model).vsa
    store = model.store
    return package("fasth3_core.planning").Wanted(
        width=width, height=height, frames=frames, text_tokens=TEXT_TOKENS, forwards=forwards, config=model.config,
        vsa=vsa, sizes=store.sizes(DEVICE), element_size=2, dequantised=store.widened_bytes(),
        fp8=store.fp8,
    )


def compare_plan(model, sizes) -> list[dict]:
    plan = package("fasth3_core.planning").plan
    rows = []
    for size in sizes:
        empty()
        _, seconds, peak = run(model, size, 1)
        reserved = torch.cuda.max_memory_reserved()
        planned = plan(wanted_of(model, size, 1))
        beside = peak - planned.weight_bytes
        rows.append({
            "size": "x".join(map(str, size)), "measured_gib": gib(peak), "planned_gib": gib(planned.peak_bytes),
            "activations_gib": gib(beside), "planned_activations_gib": gib(planned.run.peak),
            "reserved_gib": gib(reserved), "forward_s": round(seconds[0], 3),
            "parts_gib": {k: gib(v) for k, v in planned.run.to_dict().items()},
        })  # fmt: skip
    return rows


def streamed(
    model, expected, resident_s: float, budget_gib: float, name: str, *, pinned: bool = True, repeats: int = 1
) -> dict:
    placement = package("fasth3_core.weights.placement")
    plan = package("fasth3_core.planning").plan
    wanted = wanted_of(model, MAIN, 2)
    room = placement.Room(
        device=int(budget_gib * 2**30), host=package("fasth3_core.weights.host_memory").available_bytes(),
        pinnable=(100 << 30) if pinned else 0,
    )
    chosen = placement.choose(placement.Offload(policy="stream"), wanted.sizes, room, plan(wanted).run.working)
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
            result, steps, peak = run(model, MAIN, 2)
            if not (torch.equal(result.video, expected.video) and torch.equal(result.audio, expected.audio)):
                raise SystemExit(f"{name}: a streamed run differs from the resident one")
            seconds += steps
        reserved = torch.cuda.max_memory_reserved()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    return {
        "run": name, "budget_gib": budget_gib, "layers": model.config.num_layers, "peak_gib": gib(peak),
        "reserved_gib": gib(reserved), "planned_gib": gib(plan(wanted, chosen).peak_bytes),
        "forward_s": [round(s, 3) for s in seconds], "resident_forward_s": round(resident_s, 3),
        "slowdown": round(min(seconds) / resident_s, 4), "load_s": round(loaded, 1), **result.report.weights,
    }  # fmt: skip


def empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def gib(nbytes: float) -> float:
    return round(nbytes / 2**30, 2)


def resident_run(model, name: str):
    started = time.perf_counter()
    model.store.materialise(DEVICE)
    loaded = time.perf_counter() - started
    run(model, MAIN, 1)  # loads kernels
    result, seconds, peak = run(model, MAIN, 2)
    row = {"run": name, "layers": model.config.num_layers, "peak_gib": gib(peak), "load_s": round(loaded, 1),
           "forward_s": [round(s, 3) for s in seconds]}  # fmt: skip
    return result, min(seconds), row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--quantised-layers", type=int, default=20, help="of the int8 and fp8 rows")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="that the plan is compared at")
    parser.add_argument("--only-plan", action="store_true", help="the plan beside measured peaks alone")
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

    model = model_of(source_of(args.layers, "bf16"))
    expected, resident_s, row = resident_run(model, "bf16 resident")
    keep(row)
    record["plan"] = compare_plan(model, SIZES[: args.sizes])
    print("\n".join(map(json.dumps, record["plan"])), flush=True)
    (args.out / "offload.json").write_text(json.dumps(record, indent=1))
    if args.only_plan:
        return
    for budget in (12.0, 22.0):
        keep(streamed(model, expected, resident_s, budget, f"bf16 stream {budget:g} GiB", repeats=2))
    model.store.forget()
    name = "bf16 stream 12 GiB, through page-locked buffers"
    keep(streamed(model, expected, resident_s, 12.0, name, pinned=False))
    for form in ("int8", "fp8"):
        model.store.forget()
        model = None
        empty()
        model = model_of(source_of(args.quantised_layers, form))
        expected, resident_s, row = resident_run(model, f"{form} resident")
        keep(row)
        keep(streamed(model, expected, resident_s, 12.0, f"{form} stream 12 GiB"))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
