"""probe-decoder: how a 24-block video decoder decodes, found by comparing it with the released one."""

import argparse
from dataclasses import asdict
from pathlib import Path

from . import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("decoder", type=Path, help="the 24-block video VAE; what is found is written beside it")
    parser.add_argument("--teacher", type=Path, required=True, help="the released video VAE (36 blocks)")
    parser.add_argument("--latent", type=Path, required=True,
                        help="of FastH3 Save Latent, of a real clip; its middle, up to 12 x 32 x 32, is decoded")
    options.add_device(parser)


def main(args: argparse.Namespace) -> int:
    """0 if a combination is close enough to be the right one, which is then remembered, else 1."""
    from ..fasth3_core.checkpoint.load import load_video_vae
    from ..fasth3_core.checkpoint.window_choice import remember
    from ..fasth3_core.media.latent_file import load
    from ..fasth3_core.vae.probe import LEAST_DB, Tried, probe
    from ..fasth3_core.vae.windows import WindowOptions
    from .devices import chosen

    device = chosen(args.device)
    latent = middle(load(args.latent)[0])
    print(f"latent {list(latent.shape)} on {device}")

    def told(tried: Tried) -> None:
        choice = " ".join(f"{name}={value}" for name, value in asdict(tried.options).items())
        print(f"{tried.psnr_db:7.2f} dB  worst frame {tried.worst_frame_db:7.2f}  {choice}", flush=True)

    teacher = load_video_vae(args.teacher, device=device, only="decoder")
    student = load_video_vae(args.decoder, device=device, only="decoder", windows=WindowOptions())
    best = probe(student, teacher, latent, told)[0]
    if best.psnr_db < LEAST_DB:
        print(
            f"none is above {LEAST_DB:g} dB, the best has {best.psnr_db:.2f}: the file is another decoder, such as the "
            "causal one, which this package does not run, or the latent is of no real clip. Nothing was written."
        )
        return 1
    where = remember(args.decoder, best.options, best.psnr_db, args.teacher)
    print(f"best: {best.psnr_db:.2f} dB, remembered in {where.name}")
    return 0


def middle(latent):
    """At most the first 12 latents and the middle 32 x 32 of [1, 24, T, h, w]: of 5k + 2 latents, 5k + 2 again."""
    h, w = latent.shape[3:]
    top, left = max(0, h - 32) // 2, max(0, w - 32) // 2
    return latent[:, :, :12, top : top + 32, left : left + 32]
