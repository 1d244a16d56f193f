"""Time and memory of decoding straight into a file, on one GPU with seeded weights, or on the host alone.

    python bench/decode_to_video.py --out bench/results         a GPU: the decoder of the release, random weights
    python bench/decode_to_video.py --stand-in --frames 362     no GPU: a decoder that yields noise of full size

On the GPU checks come first: a decode that runs out of memory half-way goes on to the same frames, and the delivered
whole numbers are those of a plain decode. Then 124 and 362 frames of 768 x 1344 are timed, with the peak of device and
host memory, and again with the device capped at 8, 12 and 16 GiB. Where PyAV is missing the frames are delivered to
nothing instead of an encoder ("encoder": "none"), and the row says so.
"""

import argparse
import json
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from _package import environment, package

behind = package("fasth3_core.media.behind")
formats = package("fasth3_core.media.formats")
pixels = package("fasth3_core.media.pixels")
resume = package("fasth3_core.vae.resume")
chunks = package("fasth3_core.vae.chunks")

HEIGHT, WIDTH = 768, 1344
CAPS_GIB = (16, 12, 8)
GIB = 1 << 30
HAS_AV = find_spec("av") is not None


class HostPeak:
    """Largest resident size of this process while the block runs, above what it was before, sampled every 20 ms."""

    def __enter__(self) -> "HostPeak":
        self.before = self.peak = resident()
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.ending.wait(0.02):
            self.peak = max(self.peak, resident())

    def __exit__(self, *failure) -> None:
        self.ending.set()
        self.thread.join()
        self.peak = max(self.peak, resident())

    @property
    def gib(self) -> float:
        return round((self.peak - self.before) / GIB, 3)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class StandIn:
    """A VideoVAE as far as Delivery goes: noise of full size, in fp32, one clip at a time."""

    def __init__(self, height: int, width: int):
        self.size = height, width

    def decode_chunks(self, latent, **_) -> Iterator[torch.Tensor]:
        plan = chunks.decode_plan(latent.shape[2])
        sizes = [chunks.CLIP_FRAMES] * plan.clips + [chunks.OVERLAP_FRAMES]
        # a moving ramp under noise: something an encoder has work with
        columns = torch.linspace(0, 0.8, self.size[1]).expand(3, 1, *self.size)
        for number, count in enumerate(sizes):
            yield (columns.roll(16 * number, -1) + 0.03 * torch.rand(1, 3, count, *self.size)).clamp_(0, 1)


@contextmanager
def delivering(name: str, height: int, width: int, frames: int) -> Iterator[Callable[[torch.Tensor], None]]:
    """The package's own delivery with sound, into a temporary file; to nothing where PyAV is missing."""
    if not HAS_AV:
        with behind.behind(lambda chunk: chunk.arrived()) as thread:
            yield lambda part: thread(pixels.send(pixels.quantise(part)))
        return
    delivery, sound = package("fasth3_core.media.delivery"), package("fasth3_core.media.sound")
    output = formats.output(name)
    wave = 0.1 * torch.randn(2, round(frames / 24 * 32000))
    with tempfile.TemporaryDirectory() as folder:
        path, track = Path(folder) / f"a{output.form.suffix}", sound.fit(wave, 32000, frames)
        with delivery.delivering(path, output, width, height, sound=track) as put:
            yield put
        if path.is_file():
            print(f"  {path.stat().st_size / 1e6:.1f} MB", flush=True)


def deliver(vae, latent: torch.Tensor, name: str) -> None:
    height, width = (16 * side for side in latent.shape[3:])
    frames = chunks.decode_plan(latent.shape[2]).frames
    with delivering(name, height, width, frames) as put, torch.inference_mode():
        resume.Delivery(latent, lambda part, clip: put(part)).attempt(vae)


def latent_of(frames: int, height: int = HEIGHT, width: int = WIDTH) -> torch.Tensor:
    shape = (1, 24, (frames - 5) // 17 * 5 + 2, height // 16, width // 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(frames))


def row(case: str, vae, frames: int, name: str, device: torch.device, **more) -> dict:
    latent = latent_of(frames)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with HostPeak() as host:
        begun = time.perf_counter()
        deliver(vae, latent, name)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    found = {"case": case, "frames": frames, "format": name, "encoder": "PyAV" if HAS_AV else "none",
             "seconds": round(seconds, 2), "host_peak_gib": host.gib, **more}
    if device.type == "cuda":
        found["device_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        found["device_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    print(json.dumps(found), flush=True)
    return found


def check(vae) -> list[dict]:
    """A decode that stops before its second clip's second tile, and one that is stopped while handing on, go on to the
    frames of one that does not stop; whole numbers are within 1/255 of a plain decode's."""
    latent, rows = latent_of(39, 288, 320), []

    def whole(fail_at: int, fail_put: int) -> torch.Tensor:
        calls, parts = [], []

        def put(part: torch.Tensor, clip: int) -> None:
            if clip == fail_put and len(parts) == fail_put and not stopped:
                stopped.append(1)
                raise torch.OutOfMemoryError("in the check")
            parts.append(pixels.send(pixels.quantise(part)).arrived())

        def tick() -> None:
            calls.append(1)
            if len(calls) == fail_at:
                raise torch.OutOfMemoryError("in the check")

        stopped: list[int] = []
        delivery = resume.Delivery(latent, put)
        while True:
            try:
                with torch.inference_mode():
                    delivery.attempt(vae, 1, None, tick)
                return torch.cat(parts)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()

    straight = whole(0, -1)
    plain = pixels.quantise(vae.decode(latent, tile_batch=1)[0].permute(1, 2, 3, 0))
    rows.append({"check": "delivered = decoded", "ok": bool((straight == plain).all())})
    rows.append({"check": "resumed after a tile", "ok": bool((whole(6, -1) == straight).all())})
    rows.append({"check": "resumed after a clip", "ok": bool((whole(0, 1) == straight).all())})
    part = torch.rand(3, 32, 32, 3, generator=torch.Generator().manual_seed(1))
    for bits in (8, 16):
        there = pixels.send(pixels.quantise(part.to(vae.device), bits)).arrived()
        rows.append({"check": f"whole numbers of {bits} bits", "ok": torch.equal(there, pixels.quantise(part, bits))})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the rows (h200_decode_to_video.json)")
    parser.add_argument("--name", default="h200_decode_to_video", help="of the file of rows (%(default)s)")
    parser.add_argument("--stand-in", action="store_true", help="no decoder: full-size noise, on the host")
    parser.add_argument("--frames", type=int, nargs="+", default=[124, 362])
    parser.add_argument("--formats", nargs="+", default=["mp4 h264"], choices=list(formats.FORMATS))
    parser.add_argument("--commit", help="recorded with the rows where git is not at hand; default: HEAD")
    parser.add_argument("--most-host-gib", type=float, default=1.5, help="above it the exit status is 1 (%(default)s)")
    args = parser.parse_args()
    if args.stand_in:
        vae, device = StandIn(HEIGHT, WIDTH), torch.device("cpu")
        checks: list[dict] = []
    else:
        device = torch.device("cuda", 0)
        bench = __import__("vae_decode")
        vae = package("fasth3_core.vae").VideoVAE.from_tensors(
            {n: t for n, t in bench.video_weights(device).items() if n.startswith(("decoder.", "post_quant"))},
            torch.float16, device,
        )
        checks = check(vae)
        for found in checks:
            print(json.dumps(found), flush=True)
        if not all(found["ok"] for found in checks):
            return 1
        deliver(vae, latent_of(22), args.formats[0])  # compiles kernels, locks pages
    rows = [row("free", vae, frames, name, device) for name in args.formats for frames in args.frames]
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        for cap in CAPS_GIB:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(cap * GIB / total, device)
            rows.append(row(f"capped at {cap} GiB", vae, 124, args.formats[0], device, cap_gib=cap))
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        about = environment() | ({"commit": args.commit} if args.commit else {})
        record = {**about, "checks": checks, "rows": rows}
        (args.out / f"{args.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(any(found["host_peak_gib"] > args.most_host_gib for found in rows))


if __name__ == "__main__":
    raise SystemExit(main())
