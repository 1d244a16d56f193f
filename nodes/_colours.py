"""The map from latents to RGB that previews use, fitted to the user's own VAE while it decodes."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..fasth3_core.media import rgb_map
from ._vae_pair import VaePair

log = logging.getLogger("fasth3")

Fitting = Callable[[torch.Tensor, int], None]
"""Called with the frames of a clip [n, H, W, 3] and its number."""


def newest_map(roots: list[Path]) -> rgb_map.RGBMap:
    """The map that was fitted last: all video VAEs of H3 share one latent space. The built-in one if there is none."""
    files = [path for root in roots for path in root.glob(f"*{rgb_map.SUFFIX}")]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        if (found := rgb_map.load(path)) is not None:
            return found
    return rgb_map.BUILT_IN


@contextmanager
def fitting(vae: VaePair, latent: torch.Tensor) -> Iterator[Fitting]:
    """Fit the map to what the block decodes of `latent`, and keep it beside the VAE's file if it is a good one. Once
    for each file."""
    path = vae.video_path.with_name(vae.video_path.name + rgb_map.SUFFIX)
    if path.exists():
        yield lambda frames_FHWC, clip: None
        return
    fit = rgb_map.Fit()
    yield lambda frames_FHWC, clip: fit.add(latent, clip, frames_FHWC)
    if not fit.pixels or not fit.is_good(found := fit.solve()):
        return
    try:
        rgb_map.save(path, found)
    except OSError as error:  # models may lie where nobody but their owner writes
        log.info("FastH3: previews keep their colours: %s", error)
