"""The other video decoders at full size, a decode that runs out of memory, and a soak, on one GPU.

    python3 bench/vae_decoders.py --out bench/results

taeh3 (a draft) and the 24-block decoder of whole frames, with random weights of the released sizes: time and peak at
124 and 362 frames of 768 x 1344. Then the 36-block decoder in fp16: under a cap in which seven tiles a call do not fit
it has to give the bits of a decode without one; and after ten decodes device and host memory have to be where they were
after the second. The exit status is 1 if any of it fails.
"""

import argparse
import json
import logging
import time
from pathlib import Path

import torch
from _package import environment, package
from decode_to_video import resident
from vae_decode import GIB, Seeded, video_weights

vaes = package("fasth3_core.vae")
draft = package("fasth3_core.vae.draft")
windows = package("fasth3_core.vae.windows")

HEIGHT, WIDTH = 48, 84
DRAFT_WIDTHS = (256, 128, 64)
SOAK, SOAK_FRAMES = 10, 56
MOST_HOST_GROWTH = 64 << 20
"""Allocators of threads may keep some pages; a leak of one clip would be 210 MB a decode."""


def draft_weights(device: torch.device, widths: tuple[int, ...] = DRAFT_WIDTHS) -> dict[str, torch.Tensor]:
    """The decoder of taeh3; residual branches are damped so that the picture does not grow through nine blocks."""
    seeded = Seeded(device, 3)
    seeded.layer("decoder.1", widths[0], 24, 3, 3)
    for stage, (width, after, grow) in enumerate(zip(widths, (*widths[1:], widths[-1]), (1, 2, 2), strict=True)):
        first = 3 + 6 * stage
        for index in range(first, first + 3):
            for part, inp in ((0, 2 * width), (2, width), (4, width)):
                seeded.layer(f"decoder.{index}.conv.{part}", width, inp, 3, 3, std=0.5 * (9 * inp) ** -0.5)
        seeded.normal(f"decoder.{first + 4}.conv.weight", width * grow, width, 1, 1)
        seeded.normal(f"decoder.{first + 5}.weight", after, width, 3, 3)
    seeded.layer("decoder.22", 12, widths[-1], 3, 3)
    return seeded.tensors


def latent_of(frames: int, height: int = HEIGHT, width: int = WIDTH) -> torch.Tensor:
    latents = (frames - 5) // 17 * 5 + 2
    return torch.randn(1, 24, latents, height, width, generator=torch.Generator().manual_seed(frames))


def timed(vae, latent: torch.Tensor, **how) -> tuple[torch.Tensor, dict]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    pixels = vae.decode(latent, **how)
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - begun, 3)
    peak = torch.cuda.max_memory_allocated()
    return pixels, {"seconds": seconds, "weights_gib": round(vae.nbytes / GIB, 3), "peak_gib": round(peak / GIB, 2)}


def others(device: torch.device, frames: list[int]) -> list[dict]:
    rows = []
    makers = {
        "draft (taeh3)": lambda: draft.DraftVAE.from_tensors(draft_weights(device), torch.float16, device),
        "whole frames, 24 blocks": lambda: vaes.VideoVAE.from_tensors(
            decoder_only(video_weights(device, 24)), torch.float16, device, windows=windows.WindowOptions()
        ),
    }
    for name, make in makers.items():
        vae = make()
        torch.cuda.empty_cache()
        vae.decode(latent_of(22))
        for count in frames:
            pixels, found = timed(vae, latent_of(count))
            ok = pixels.shape[2] == count and bool(pixels.isfinite().all())
            rows.append({"decoder": name, "frames": count, "ok": ok, **found})
            print(json.dumps(rows[-1]), flush=True)
            del pixels
    return rows


def decoder_only(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if name.startswith(("decoder.", "post_quant"))}


class Warnings(logging.Handler):
    """Texts that the package logged."""

    def __init__(self):
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def retry(vae, device: torch.device, latent: torch.Tensor) -> dict:
    """Out of memory in the middle: fewer tiles a call, the same bits."""
    heard = Warnings()
    logging.getLogger("fasth3.vae").addHandler(heard)
    free, found = timed(vae, latent)
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    cap = held + 0.6 * (found["peak_gib"] * GIB - held)
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    try:
        capped, found = timed(vae, latent)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    same = torch.equal(free, capped)
    row = {"case": "capped", "cap_gib": round(cap / GIB, 2), "ok": same and bool(heard.texts), "same_bits": same,
           "said": heard.texts, **found}  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def soak(vae, device: torch.device, latent: torch.Tensor) -> dict:
    states = []
    for _ in range(SOAK):
        vae.decode(latent)
        torch.cuda.synchronize()
        states.append((torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), resident()))
    (allocated, reserved, host), last = states[1], states[-1]
    ok = last[:2] == (allocated, reserved) and last[2] - host <= MOST_HOST_GROWTH
    names = ("allocated_gib", "reserved_gib", "host_gib")
    levels = {name: [round(state[i] / GIB, 3) for state in states] for i, name in enumerate(names)}
    row = {"case": f"soak of {SOAK}", "ok": ok, **levels}
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for vae_decoders.json")
    parser.add_argument("--frames", type=int, nargs="+", default=[124, 362])
    parser.add_argument("--commit", help="recorded with the rows where git is not at hand; default: HEAD")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    rows = others(device, args.frames)
    vae = vaes.VideoVAE.from_tensors(decoder_only(video_weights(device)), torch.float16, device)
    torch.cuda.empty_cache()
    vae.decode(latent_of(22))
    rows.append(retry(vae, device, latent_of(56)))
    rows.append(soak(vae, device, latent_of(SOAK_FRAMES)))
    about = environment() | ({"commit": args.commit} if args.commit else {})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "vae_decoders.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    with torch.inference_mode():
        raise SystemExit(main())
