"""The full-size model on one GPU: a request at 768 x 1344 x 124, from prompt embeddings to an MP4, stage by stage.

    python3 bench/full_size.py --out DIR

Four forwards, the sound, then the video decoded into the encoder; where PyAV is missing the frames go nowhere and the
row says so. `request` is the sum of the three. Frames of random weights are noise, the hardest there is to encode: they
are encoded once as they are and once softened, which is more like a picture, and `request` counts the latter.

Weights are random (35 B parameters in bf16, made on the device), so times and memory are real and pictures are not.
Nothing is printed unless every latent, pixel and sample is finite.
"""

import argparse
import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from _package import environment, package

FRAMES, HEIGHT, WIDTH = 124, 768, 1344
TEXT_TOKENS = 256


class Stages:
    """Seconds and peak bytes of each stage."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def run(self, name: str, function, *args, **kwargs):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        out = function(*args, **kwargs)
        torch.cuda.synchronize()
        self.rows.append(
            {
                "stage": name,
                "seconds": round(time.perf_counter() - started, 3),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "held_before_gib": round(before / 2**30, 2),
            }
        )
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--backend", default="auto", help="VSA backend")
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()

    stages = Stages()
    device = torch.device("cuda")
    result = stages.run("weights", make_model, args.layers, device)
    report = sample_twice(result, args.backend, device, stages)
    del result
    torch.cuda.empty_cache()
    encoder = decode(report.pop("latents"), device, stages)
    seconds = {stage["stage"]: stage["seconds"] for stage in stages.rows}
    request = sum(seconds[stage] for stage in ("sample", "audio decode", "video to MP4, softened"))

    row = {
        **environment(),
        "frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "layers": args.layers,
        **report,
        "stages": stages.rows,
        "encoder": encoder,
        "request_seconds": round(request, 2),
    }
    if args.commit:
        row["commit"] = args.commit
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "full_size.json").write_text(json.dumps(row, indent=1))
    for stage in stages.rows:
        print(f"{stage['stage']:<28} {stage['seconds']:>8.2f} s   peak {stage['peak_gib']:.2f} GiB")
    print(f"{'request':<28} {request:>8.2f} s   encoder {encoder}")
    print("\n".join(report["text"].splitlines()))


def make_model(layers: int, device: torch.device):
    weights = package("fasth3_core.selftest.random_weights")
    store_type = package("fasth3_core.weights.tensors").TensorStore
    dims = weights.FULL_SIZE | {"num_layers": layers}
    store = store_type(weights.random_transformer(**dims, dtype=torch.bfloat16, device=device))
    contracts = package("fasth3_core.contracts").CONTRACTS
    return package("fasth3_core.model.handle").H3Model(store.config, contracts["preview-4"], store, "random weights")


def sample_twice(model, backend: str, device: torch.device, stages: Stages) -> dict:
    """The second run is the one that counts: the first loads kernels and fills caches."""
    geometry = package("fasth3_core.packing.geometry")
    loop = package("fasth3_core.sampling.loop")
    config = package("fasth3_core.config").VSAConfig(backend=backend)
    request = package("fasth3_core.sampling.request").Request(
        text_states=torch.randn(1, TEXT_TOKENS, model.config.text_dim, generator=torch.Generator().manual_seed(1)),
        latent_frames=geometry.latent_frames(FRAMES),
        latent_height=HEIGHT // 16,
        latent_width=WIDTH // 16,
        audio_latents=geometry.audio_latents(FRAMES),
        seed=0,
    )
    first = stages.run("sample, first", loop.sample, model, request, device=device, vsa=config)
    second = stages.run("sample", loop.sample, model, request, device=device, vsa=config)
    for name, a, b in (("video", first.video, second.video), ("audio", first.audio, second.audio)):
        if not torch.isfinite(b).all():
            raise SystemExit(f"{name} latents are not finite")
        if not torch.equal(a, b):
            raise SystemExit(f"{name} latents of the same seed differ between two runs")
    return {"report": second.report.to_dict(), "text": second.report.to_text(), "latents": (second.video, second.audio)}


def decode(latents, device: torch.device, stages: Stages) -> str:
    """Both decodes, the video's once into memory and once into a file with the sound; the encoder that wrote it."""
    from vae_decode import audio_weights, video_weights

    vaes = package("fasth3_core.vae")
    video, audio = latents
    sound = stages.run("audio VAE weights", lambda: vaes.AudioVAE.from_tensors(audio_weights(device), device=device))
    stages.run("audio decode, first", sound.to_waveform, audio, FRAMES)
    wave = stages.run("audio decode", sound.to_waveform, audio, FRAMES)
    if not torch.isfinite(wave).all():
        raise SystemExit("the decoded sound is not finite")
    half = torch.float16
    vae = stages.run("video VAE weights", lambda: vaes.VideoVAE.from_tensors(video_weights(device), half, device))
    torch.cuda.empty_cache()
    stages.run("video decode, first", vae.decode, video)
    pixels = stages.run("video decode", vae.decode, video)
    if pixels.shape != (1, 3, FRAMES, HEIGHT, WIDTH) or not torch.isfinite(pixels).all():
        raise SystemExit("the decoded video is not finite or not of its size")
    del pixels
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request.mp4"
        for name, change in (("video to MP4, noise", lambda frames: frames), ("video to MP4, softened", soften)):
            stages.run(name, deliver, vae, video, wave, path, change)
            if path.is_file():
                stages.rows[-1]["file_mb"] = round(path.stat().st_size / 1e6, 1)
        if not find_spec("av"):
            return "none"
        import av

        with av.open(str(path)) as movie:
            found = sum(1 for _ in movie.decode(video=0)), movie.streams.audio[0].codec_context.sample_rate
        if found != (FRAMES, 32000):
            raise SystemExit(f"the MP4 has (frames, sample rate) {found}")
        return "libx264"


def soften(frames_FHWC: torch.Tensor) -> torch.Tensor:
    """Without detail below eight pixels."""
    small = F.avg_pool2d(frames_FHWC.permute(0, 3, 1, 2), 8)
    return F.interpolate(small, scale_factor=8, mode="bilinear").permute(0, 2, 3, 1)


def deliver(vae, latent: torch.Tensor, wave: torch.Tensor, path: Path, change) -> None:
    """The video decoded straight into the encoder, with its sound, as the node does."""
    resume, pixels = package("fasth3_core.vae.resume"), package("fasth3_core.media.pixels")
    if not find_spec("av"):
        with package("fasth3_core.media.behind").behind(lambda chunk: chunk.arrived()) as thread:
            resume.Delivery(latent, lambda part, clip: thread(pixels.send(pixels.quantise(change(part))))).attempt(vae)
        return
    media, sound = package("fasth3_core.media.delivery"), package("fasth3_core.media.sound")
    output = package("fasth3_core.media.formats").Output()
    track = sound.fit(wave[0].cpu(), 32000, FRAMES)
    with media.delivering(path, output, WIDTH, HEIGHT, sound=track) as put:
        resume.Delivery(latent, lambda part, clip: put(change(part))).attempt(vae)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
