"""demo: a tiny model in the real file formats, the shipped graph run on it, and a look at the MP4 that comes out."""

import argparse
import json
import shlex
import sys
import time
from fractions import Fraction
from pathlib import Path

from ..fasth3_core.packing.geometry import FPS, SAMPLE_RATE, audio_samples, snap_frames
from . import options
from .graph import apply_settings, read_graph
from .run import run_graph

GRAPH = Path(__file__).resolve().parents[1] / "workflows" / "api" / "fasth3_t2v_from_embeds.json"
WIDTH, HEIGHT = 448, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder to make (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the video (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of the noise (%(default)d)")
    options.add_device(parser)


def main(args: argparse.Namespace) -> int:
    from .demo_bundle import write_bundle  # here, not at the top: needs the node API, and `--help` must work without

    started = time.perf_counter()
    names = write_bundle(args.out)
    print(f"wrote a tiny model to {args.out}", flush=True)
    graph = read_graph(GRAPH)
    apply_settings(graph, [
        f"FastH3LoadModel.model_name={names.model}", "FastH3LoadModel.contract=auto",
        f"FastH3LoadVAE.video_vae={names.video_vae}", f"FastH3LoadVAE.audio_vae={names.audio_vae}",
        f"FastH3LoadPromptEmbeds.file={names.prompt}", f"FastH3Sampler.seed={args.seed}",
        "FastH3EmptyLatent.aspect=custom", f"FastH3EmptyLatent.width={WIDTH}", f"FastH3EmptyLatent.height={HEIGHT}",
        f"FastH3EmptyLatent.seconds={args.seconds}",
    ])
    (args.out / "graph.json").write_text(json.dumps(graph, indent=1), encoding="utf-8")
    files = run_graph(graph, args.out / "models", args.out / "input", args.out / "output", args.device)
    problems = [problem for path in files for problem in look_at(path, snap_frames(args.seconds))]
    problems += [] if files else ["the graph saved nothing"]
    print("\n".join(f"WRONG: {problem}" for problem in problems) or "all as it should be")
    again = shlex.join([
        sys.executable, "-m", __package__.split(".")[0], "run", f"{args.out}/graph.json",
        "--models", f"{args.out}/models", "--input", f"{args.out}/input", "--output", f"{args.out}/output",
        "--set", "FastH3Sampler.seed=2",
    ])  # fmt: skip
    print(f"{time.perf_counter() - started:.1f} s; to run it again, changed:\n{again}")
    return 1 if problems else 0


def look_at(path: Path, frames: int) -> list[str]:
    """Print what PyAV finds in an MP4, and return what is not as FastH3 Decode to Video should have written it."""
    import av

    with av.open(str(path)) as container:
        video, audio = container.streams.video, container.streams.audio
        if len(video) != 1 or len(audio) != 1:
            return [f"{path.name} has {len(video)} video and {len(audio)} audio streams, expected one of each"]
        counted = sum(1 for _ in container.decode(video=0))
        seconds = audio[0].duration * audio[0].time_base
        expected = Fraction(audio_samples(frames), SAMPLE_RATE)
        found = {
            "video codec": (video[0].codec_context.name, "h264"),
            "size": (f"{video[0].width}x{video[0].height}", f"{WIDTH}x{HEIGHT}"),
            "frames": (counted, frames),
            "frames a second": (video[0].average_rate, FPS),
            "audio codec": (audio[0].codec_context.name, "aac"),
            "audio channels": (audio[0].codec_context.channels, 2),
            "audio rate": (audio[0].codec_context.sample_rate, SAMPLE_RATE),
            "audio seconds": (f"{float(seconds):.5f}", f"{float(expected):.5f}"),
        }
    print(f"{path}: " + ", ".join(f"{name} {value}" for name, (value, _) in found.items()))
    return [f"{name} is {value}, expected {want}" for name, (value, want) in found.items() if value != want]
