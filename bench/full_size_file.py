"""A full-size file quantised, loaded and run on one GPU, beside the file that it was made from.

    python3 bench/full_size_file.py --folder /dev/shm/h3 --out DIR
    python3 bench/full_size_file.py --folder /dev/shm/h3 --out DIR --again

Writes a random transformer of the released size with AdaLN in the curve form (43 GB in bf16; two blocks stand for all),
quantises it to `--form` with the command, and runs both files and the first one quantised as it loads. `--again`, in a
process of its own, fails in the middle of a forward of the quantised file and then runs it: the bits must be those of
before.
"""

import argparse
import contextlib
import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import offload
import torch
from _package import environment, package
from offload import DEVICE, MAIN, difference, gib, run

TABLE = (1001, 8)
"""Points of the curve over time, and inputs of the AdaLN linears that read it."""
WRITERS = 8


def curve_parts() -> dict[str, torch.Tensor]:
    """Canonical weights of two blocks and everything else, on the host."""
    weights = package("fasth3_core.selftest.random_weights")
    made = weights.random_transformer(
        **weights.FULL_SIZE | {"num_layers": 2}, dtype=torch.bfloat16, device=DEVICE
    )
    made = {n: t for n, t in made.items() if not n.startswith("time_embedder.")}
    for name in [n for n in made if n.endswith("adaln_proj.linear.weight")]:
        made[name] = torch.randn(made[name].shape[0], TABLE[1], device=DEVICE) * 0.3 * TABLE[1] ** -0.5
        bias = name.replace(".weight", ".bias")
        made[bias] = made[bias].float()
    slope = torch.randn(1, TABLE[1], device=DEVICE)
    made["adaln_t_table"] = slope * torch.linspace(0, 1, TABLE[0], device=DEVICE)[:, None]
    return {n: t.to("cpu") for n, t in made.items()}


def write_source(path: Path, layers: int) -> float:
    """Seconds that it took to write, on several threads."""
    stream, files = package("fasth3_core.checkpoint.stream"), package("fasth3_core.checkpoint.files")
    names = package("fasth3_core.checkpoint.dtypes").NAMES
    parts = curve_parts()
    tensors = {n: t for n, t in parts.items() if not n.startswith("blocks.")}
    for i in range(layers):
        own = f"blocks.{i % 2}."
        tensors |= {f"blocks.{i}." + n.removeprefix(own): t for n, t in parts.items() if n.startswith(own)}
    layout = {n: files.Stored(names[t.dtype], tuple(t.shape)) for n, t in tensors.items()}
    header, size = stream.file_header(layout, {"fasth3.layout": "single-file"})
    started, at, jobs = time.perf_counter(), len(header), []
    with open(path, "wb") as file, ThreadPoolExecutor(WRITERS) as pool:
        file.truncate(at + size)
        os.pwrite(file.fileno(), header, 0)
        for tensor in tensors.values():
            raw = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            for start in range(0, raw.nbytes, 64 << 20):
                jobs.append(pool.submit(os.pwrite, file.fileno(), raw[start : start + (64 << 20)], at + start))
            at += raw.nbytes
        for job in jobs:
            job.result()
    return time.perf_counter() - started


def quantise(source: Path, output: Path, form: str) -> dict:
    said, started = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(said):
        command = ["quantize", str(source), str(output), "--form", form, "--device", DEVICE.type, "--json"]
        code = package("cli").main(command)
    if code:
        raise SystemExit(said.getvalue())
    seconds, result = time.perf_counter() - started, json.loads(said.getvalue())
    worst = max(result["layers"], key=lambda layer: layer["loss"])
    return {
        "run": f"quantize to {form}", "seconds": round(seconds, 1), "source_gb": gb(source.stat().st_size),
        "gb": gb(result["bytes"]), "relative_error": round(result["relative_error"], 5), "worst_layer": worst["layer"],
        "worst_error": round(worst["loss"], 5), "layers": len(result["layers"]),
    }  # fmt: skip


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def loaded(path: Path, dtype: str, name: str):
    """(model, row)."""
    load_model = package("fasth3_core.checkpoint.load").load_model
    offload.empty()
    torch.zeros(1, device=DEVICE)
    before, seen, started = anonymous_bytes(), [0], time.perf_counter()
    model = load_model(path, contract="preview-4", dtype=dtype)
    opened = time.perf_counter() - started
    model.store.materialise(DEVICE, lambda done, total: seen.append(anonymous_bytes() - before))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    again = load_model(path, contract="preview-4", dtype=dtype)
    again.store.materialise(DEVICE)
    if again.store is not model.store:
        raise SystemExit("the same file was loaded twice")
    return model, {
        "run": name, "file_gb": gb(path.stat().st_size), "open_s": round(opened, 2), "load_s": round(seconds, 1),
        "gb_per_s": round(path.stat().st_size / 1e9 / seconds, 1), "again_s": round(time.perf_counter() - started, 3),
        "host_peak_gib": gib(max(seen)), "weights_gib": gib(model.store.nbytes(DEVICE)),
    }  # fmt: skip


def same_as_in_memory(model, source, index: int, form: str) -> None:
    """The file's block must hold what quantising the float weights in this process gives."""
    module = package("fasth3_core.checkpoint.quantise")
    for name, weight in model.store.block(index).items():
        if not isinstance(weight, torch.Tensor):
            wide = source.opened.component.read(f"blocks.{index}.{name}", DEVICE)
            made, _ = module.quantise(wide, module.spec_for(form, wide.shape[1]))
            same = torch.equal(made.data.view(torch.uint8), weight.data.view(torch.uint8))
            if not (same and (made.scale == weight.scale).all()):
                raise SystemExit(f"block {index}, {name}: the file differs from what is quantised in memory")


def gb(nbytes: int) -> float:
    return round(nbytes / 1e9, 2)


def again(path: Path, latents: Path) -> dict:
    model, row = loaded(path, "auto", f"{path.stem} file, another process")
    sample, schedule = package("fasth3_core.sampling.loop").sample, package("fasth3_core.sampling.schedule")
    grids = tuple(schedule.shifted(schedule.uniform_base(3), shift) for shift in (12.0, 3.0))
    checks = 0

    def stop() -> None:
        nonlocal checks
        checks += 1
        if checks == model.config.num_layers + (1 + 2 * model.config.num_layers) + 2 * 20:
            raise KeyboardInterrupt  # tables, the first forward, and 20 blocks of the second

    try:
        sample(model, offload.request_of(model, *MAIN), device=DEVICE, schedules=grids, check_interrupt=stop)
    except KeyboardInterrupt:
        held = torch.cuda.memory_allocated()
    else:
        raise SystemExit("the run was not stopped")
    result, seconds, peak = run(model, MAIN, 2)
    kept = torch.load(latents)
    if not (torch.equal(result.video, kept["video"]) and torch.equal(result.audio, kept["audio"])):
        raise SystemExit("after a failure in the middle of a forward the bits are not those of another process")
    return row | {"stopped_after_checks": checks, "held_after_failure_gib": gib(held), "peak_gib": gib(peak),
                  "forward_s": [round(s, 3) for s in seconds], "bits": "those of the first process"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on a disk with 66 GB free")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--form", choices=("int8", "fp8"), default="int8")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("bf16.safetensors", f"{args.form}.safetensors", "latents.pt")
    source, quantised, latents = (args.folder / name for name in names)
    env = environment() | ({"commit": args.commit} if args.commit else {})
    rows = []

    def keep(row: dict) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        name = f"full_size_file_{args.form}{'_again' if args.again else ''}.json"
        (args.out / name).write_text(json.dumps(env | {"rows": rows}, indent=1))

    if args.again:
        keep(again(quantised, latents))
        return
    keep({"run": "written", "seconds": round(write_source(source, args.layers), 1), "gb": gb(source.stat().st_size)})
    keep(quantise(source, quantised, args.form))
    wide, row = loaded(source, "bf16", "bf16 file")
    plain, seconds, peak = run(wide, MAIN, 2)
    keep(row | {"peak_gib": gib(peak), "forward_s": [round(s, 3) for s in seconds]})
    wide.store.release()
    for path, dtype, name in ((quantised, "auto", f"{args.form} file"), (source, "fp8", "bf16 file in fp8")):
        model, row = loaded(path, dtype, name)
        if path == quantised:
            for index in (0, model.config.num_layers - 1):
                same_as_in_memory(model, wide, index, args.form)
        result, seconds, peak = run(model, MAIN, 2)
        if path == quantised:
            torch.save({"video": result.video, "audio": result.audio}, latents)
        keep(row | {"peak_gib": gib(peak), "forward_s": [round(s, 3) for s in seconds],
                    "latents_from_bf16": difference(result, plain)})  # fmt: skip
        model.store.release()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
