"""Previews of a run under way, and the map from latents to RGB that they use, fitted to the user's own VAE."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..fasth3_core.media import rgb_map
from ..fasth3_core.media.preview import latent_preview
from ..fasth3_core.media.preview_budget import PreviewBudget
from . import _host
from ._vae_pair import VaePair

log = logging.getLogger("fasth3")

Fitting = Callable[[torch.Tensor, int], None]
"""Called with the frames of a clip [n, H, W, 3] and its number."""


def step_shower(host: _host.Host, forwards: int) -> Callable[[int, int, torch.Tensor, torch.Tensor], None]:
    """Moves the bar after each step, with a strip of the clean estimate where the user has previews on, and as often as
    2 % of the time allow."""
    show, previews, budget = host.progress(forwards), host.wants_preview(), PreviewBudget()
    colours = newest_map(host.model_roots("vae")) if previews else rgb_map.BUILT_IN

    def on_step(done: int, total: int, x0_video: torch.Tensor, x0_audio: torch.Tensor) -> None:
        nonlocal previews
        picture = None
        if previews and budget.due():
            try:
                picture = budget.run(lambda: latent_preview(x0_video, colours))
            except Exception:  # a run of minutes must not end for a thumbnail
                log.warning("FastH3 Sampler: previews are off for this run", exc_info=True)
                previews = False
        show(done, picture)

    return on_step


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
        log.info("FastH3: previews keep the built-in colours: %s", error)
