"""Time both VAEs at full size on one GPU: 37 latents at 48 x 84 (124 frames of 768 x 1344), 207 audio latents.

    python bench/vae_decode.py --out bench/results

Weights are seeded random, made on the device, of the released sizes and scaled to a picture that neither saturates nor
vanishes: speed and memory are those of the real file, the picture is not. Correctness comes first: fp16, fp8 and int8
against fp32, and tile batches against each other; on a failed check nothing is timed and the exit status is 1.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from _package import environment, package

vae = package("fasth3_core.vae")
block_ops = package("fasth3_core.vae.block_ops")
quant = package("fasth3_core.checkpoint.quant")
hadamard = package("kernels.int8_linear").hadamard

WIDTH, BLOCKS, FF, LATENT = 2048, 36, 8192, 24
STAGES = ((128, 128, True), (128, 256, True), (256, 256, True), (256, 512, True), (512, 512, False), (512, 1024, False))
TILE_BATCHES = (1, 4, 7)
LEAST_DB = {"fp16": 50, "fp8": 45, "int8": 45}
"""Of a decode against fp32."""
LATENTS, HEIGHT, WIDTH_LATENTS, AUDIO_LATENTS = 37, 48, 84, 207
GIB = 1 << 30


class Seeded:
    """Tensors by name on one device: matrices N(0, 1/fan_in), biases N(0, .02), norms 1, everything as asked."""

    def __init__(self, device: torch.device, seed: int):
        self.device, self.generator, self.tensors = device, torch.Generator(device).manual_seed(seed), {}

    def normal(self, name: str, *shape: int, std: float | None = None) -> None:
        fan_in = max(1, torch.Size(shape[1:]).numel())
        std = fan_in**-0.5 if std is None else std
        self.tensors[name] = torch.randn(shape, generator=self.generator, device=self.device).mul_(std)

    def full(self, name: str, *shape: int, value: float) -> None:
        self.tensors[name] = torch.full(shape, value, device=self.device)

    def layer(self, name: str, *shape: int, std: float | None = None) -> None:
        self.normal(f"{name}.weight", *shape, std=std)
        self.normal(f"{name}.bias", shape[0], std=0.02)

    def norm(self, name: str, width: int) -> None:
        self.full(f"{name}.weight", width, value=1.0)
        self.full(f"{name}.bias", width, value=0.0)


def video_weights(device: torch.device, blocks: int = BLOCKS) -> dict[str, torch.Tensor]:
    seeded = Seeded(device, 1)
    seeded.layer("post_quant_conv", LATENT, LATENT, 1, 1, 1)
    seeded.layer("decoder.proj_in", WIDTH, LATENT)
    seeded.normal("decoder.register_tokens", 1, 4, WIDTH, std=1.0)
    for index in range(blocks):
        name = f"decoder.transformer_blocks.{index}"
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            seeded.layer(f"{name}.attn.{part}", WIDTH, WIDTH)
        seeded.layer(f"{name}.ff.net.0.proj", 2 * FF, WIDTH)
        seeded.layer(f"{name}.ff.net.2", WIDTH, FF)
        for part in ("norm1.weight", "norm2.weight"):
            seeded.full(f"{name}.{part}", WIDTH, value=1.0)
        for part in ("scale1", "scale2"):
            seeded.full(f"{name}.{part}", WIDTH, value=0.2)
    seeded.norm("decoder.norm_out", WIDTH)
    seeded.layer("decoder.proj_out", 3072, WIDTH, std=0.6 * WIDTH**-0.5)

    seeded.layer("encoder.conv_in", STAGES[0][0], 3, 3, 3, 3)
    for index, (inp, out, strided) in enumerate(STAGES):
        for number, width in enumerate((inp, out)):
            name = f"encoder.down_blocks.{index}.resnets.{number}"
            seeded.norm(f"{name}.norm1", width)
            seeded.layer(f"{name}.conv1", out, width, 3, 3, 3)
            seeded.norm(f"{name}.norm2", out)
            seeded.layer(f"{name}.conv2", out, out, 3, 3, 3)
            if width != out:
                seeded.layer(f"{name}.conv_shortcut", out, width, 1, 1, 1)
        if strided:
            seeded.layer(f"encoder.down_blocks.{index}.downsamplers.0.conv", out, out, 3, 3, 3)
    seeded.norm("encoder.norm_out", STAGES[-1][1])
    seeded.layer("encoder.conv_out", 2 * LATENT, STAGES[-1][1], 3, 3, 3)
    seeded.layer("quant_conv", 2 * LATENT, 2 * LATENT, 1, 1, 1)
    return seeded.tensors


def audio_weights(device: torch.device, width: int = 1024, latent: int = 2048) -> dict[str, torch.Tensor]:
    """The decoder alone: what decoding needs."""
    seeded = Seeded(device, 2)
    seeded.layer("dec_in_proj", latent, 32, 1)
    seeded.layer("decoder.conv_pre", width, latent, 7)
    for stage, kernel in enumerate((9, 9, 4, 4, 4, 4, 4)):
        seeded.normal(f"decoder.ups.{stage}.0.weight", width, width // 2, kernel, std=width**-0.5)
        width //= 2
        seeded.normal(f"decoder.ups.{stage}.0.bias", width, std=0.02)
        for block, taps in enumerate((3, 7, 11), start=3 * stage):
            name = f"decoder.resblocks.{block}"
            for number in range(3):
                for convs in ("convs1", "convs2"):
                    seeded.layer(f"{name}.{convs}.{number}", width, width, taps, std=0.3 * (width * taps) ** -0.5)
            for number in range(6):
                for part in ("alpha", "beta"):
                    seeded.normal(f"{name}.activations.{number}.act.{part}", width, std=0.1)
    for part in ("alpha", "beta"):
        seeded.normal(f"decoder.activation_post.act.{part}", width, std=0.1)
    seeded.normal("decoder.conv_post.weight", 1, width, 7, std=0.003)
    return seeded.tensors


def differences(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Largest difference in 1/255, and PSNR in dB."""
    error = (a - b).double()
    return error.abs().max().item() * 255, -10 * error.square().mean().clamp_min(1e-20).log10().item()


def convrot(weights: dict[str, torch.Tensor]) -> dict:
    """The same weights as an int8 ConvRot file has them: blocks' matrices rotated in groups of 256, a scale a row."""
    made = dict(weights)
    for name, value in weights.items():
        if name.startswith("decoder.transformer_blocks.") and value.ndim == 2:
            turned = (value.view(-1, 256) @ hadamard(256, value.device)).view_as(value)
            scale = turned.abs().amax(dim=1, keepdim=True) / 127
            data = (turned / scale).round().to(torch.int8)
            made[name] = quant.QuantizedWeight(data, scale, "int8_tensorwise", 256)
    return made


def check(exact: vae.VideoVAE, made: dict[str, vae.VideoVAE], audio: vae.AudioVAE) -> list[dict]:
    """Every form against fp32, and batches of tiles against single ones, on four tiles of one clip; audio is finite."""
    latent = torch.randn(1, LATENT, 7, 18, 20, generator=torch.Generator().manual_seed(3))
    reference = exact.decode(latent)
    saturated = ((reference == 0) | (reference == 1)).float().mean().item()
    rows = [{"check": "picture", "ok": bool(reference.isfinite().all()) and saturated < 0.2, "saturated": saturated}]
    for form, one in made.items():
        worst, psnr = differences(one.decode(latent), reference)
        ok = psnr >= LEAST_DB[form] and (worst <= 2 or form != "fp16")
        rows.append({"check": f"{form} to fp32", "ok": ok, "max_255": worst, "psnr_db": psnr})
    single = made["fp16"].decode(latent, tile_batch=1)
    for tiles in TILE_BATCHES[1:]:
        worst, psnr = differences(made["fp16"].decode(latent, tile_batch=tiles), single)
        rows.append(
            {"check": f"tile_batch {tiles}", "ok": worst <= 1 and psnr >= 60, "max_255": worst, "psnr_db": psnr}
        )
    wave = audio.decode(torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(4)))
    loud = wave.abs().mean().item()
    rows.append({"check": "audio", "ok": bool(wave.isfinite().all()) and 1e-3 < loud < 0.5, "mean_abs": loud})
    return rows


def timed(run, repeats: int) -> dict:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = round(torch.cuda.memory_allocated() / GIB, 2)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        kept = run()  # giving pages of 1.5 GB back takes time, and is not part of it
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - start, 4))
        del kept
    peak = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return {"seconds": statistics.median(seconds), "runs": seconds, "before_gib": before, "peak_gib": peak}


def parts(half: vae.VideoVAE, tiles: int) -> list[dict]:
    """Milliseconds of every step of one block at `tiles` tiles a call, and of attention by torch's other backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    decoder, block = half.decoder, half.decoder.blocks[0]
    ops = block_ops.BlockOps.choose(half.device, half.dtype, decoder.head_dim)
    rotations = decoder.rotations((7, 16, 16), half.device)
    S = tiles * rotations.shape[0]
    x = torch.randn(S, WIDTH, device=half.device)
    y, normed = torch.randn(2, S, WIDTH, device=half.device).to(half.dtype)
    both = torch.randn(S, 2 * FF, device=half.device).to(half.dtype)
    hidden = both[:, :FF].contiguous()
    qkv = torch.randn(S, 3 * WIDTH // 64, 64, device=half.device).to(half.dtype)
    query, key, value = qkv.view(tiles, -1, 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    steps = {
        "qkv product": lambda: ops.project(normed, block.qkv),
        "head_norm_rope": lambda: ops.head_norm_rope(qkv[:, : 2 * WIDTH // 64], None, rotations, 1e-5),
        "attention": lambda: ops.bounded_attention(*qkv.unflatten(1, (3, -1)).unbind(1), rotations.shape[0]),
        "out product": lambda: ops.project(y, block.out),
        "residual_rms": lambda: ops.residual_rms(x, y, block.scale1, block.out.bias, block.norm2, 1e-5, half.dtype),
        "ff_in product": lambda: torch.nn.functional.linear(normed, block.ff_in.weight),
        "swiglu": lambda: ops.swiglu(*both.chunk(2, dim=1), block.ff_in.bias),
        f"linear_swiglu, {ops.linear_swiglu.name}": lambda: ops.linear_swiglu(
            normed, block.ff_in.weight, block.ff_in.bias
        ),
        "ff_out product": lambda: ops.project(hidden, block.ff_out),
    }
    rows = [{"part": name, "tiles": tiles, "ms": round(do_bench(step, return_mode="median"), 4)}
            for name, step in steps.items()]
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            ms = do_bench(attend, return_mode="median")
        rows.append({"part": f"attention, {backend.name}", "tiles": tiles, "ms": round(ms, 4)})
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def measure(made: dict[str, vae.VideoVAE], audio: vae.AudioVAE, repeats: int, tile_batches: tuple) -> list[dict]:
    latent = torch.randn(1, LATENT, LATENTS, HEIGHT, WIDTH_LATENTS, generator=torch.Generator().manual_seed(5))
    cases = [("fp16", tiles, "cuda") for tiles in tile_batches] + [(form, 0, "cpu") for form in made]
    rows = []
    for form, tiles, out in cases:
        one = made[form]
        one.decode(latent[:, :, :7], tile_batch=tiles, out_device=out)

        def run(one=one, tiles=tiles, out=out):
            return one.decode(latent, tile_batch=tiles, out_device=out)

        result = timed(run, repeats)
        working = round(result["peak_gib"] - result.pop("before_gib"), 2)
        rows.append({"case": "video 37x48x84", "form": form, "tile_batch": tiles, "out_device": out,
                     "weights_gib": round(one.nbytes / GIB, 2), "working_gib": working, **result})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    sound = torch.randn(2, 32, AUDIO_LATENTS, generator=torch.Generator().manual_seed(6))
    audio.decode(sound)
    rows.append({"case": "audio 2x207 fp32", **timed(lambda: audio.decode(sound), 5)})
    print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for vae_decode.json")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one number of tiles a call, no steps of a block")
    parser.add_argument("--commit", help="recorded with the rows where git is not at hand; default: HEAD")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/vae_decode.py times a CUDA device, and torch sees none", file=sys.stderr)
        return 1

    device = torch.device("cuda")
    weights = video_weights(device)
    exact, half, low = (
        vae.VideoVAE.from_tensors(weights, dtype, device)
        for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn)
    )
    made = {"fp16": half, "fp8": low, "int8": vae.VideoVAE.from_tensors(convrot(weights), torch.float16, device)}
    audio = vae.AudioVAE.from_tensors(audio_weights(device), device=device)
    checks = check(exact, made, audio)
    for row in checks:
        print(json.dumps(row), flush=True)
    if not all(row["ok"] for row in checks):
        return 1
    del weights, exact
    torch.cuda.empty_cache()

    about = environment()
    if arguments.commit:
        about["commit"] = arguments.commit
    rows = measure(made, audio, arguments.repeats, TILE_BATCHES[2:] if arguments.quick else TILE_BATCHES[1:])
    if not arguments.quick:
        rows += parts(half, 4) + parts(half, 7)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [about | row for row in rows]
    (arguments.out / "vae_decode.json").write_text(json.dumps({"checks": checks, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
