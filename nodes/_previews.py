"""Pictures of a run under way: of a small decoder if there is one, else by a map from latents to RGB."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from PIL import Image

from ..fasth3_core.checkpoint.load import load_video_vae
from ..fasth3_core.errors import FastH3Error
from ..fasth3_core.media.preview import draft_preview, latent_preview
from ..fasth3_core.media.preview_budget import PreviewBudget
from ..fasth3_core.vae.draft import DraftVAE
from . import _host
from ._colours import newest_map

log = logging.getLogger("fasth3")

T, U = TypeVar("T"), TypeVar("U")

_DRAFT = "taeh3"
"""Begins the name of a draft decoder's file in `vae_approx`, where ComfyUI keeps such decoders."""


def step_shower(host: _host.Host, forwards: int) -> Callable[[int, int, torch.Tensor, torch.Tensor], None]:
    """Moves the bar after each step, with a strip of the clean estimate where the user has previews on, and as often as
    2 % of the time allow."""
    show = host.progress(forwards)
    picture_of = _attempt(_picture_maker, host) if host.wants_preview() else None
    budget = PreviewBudget()

    def on_step(done: int, total: int, x0_video: torch.Tensor, x0_audio: torch.Tensor) -> None:
        nonlocal picture_of
        if picture_of is None or not budget.due():
            show(done, None)
            return
        with budget.spending():
            picture = _attempt(picture_of, x0_video)
            picture_of = picture_of if picture is not None else None
            show(done, picture)

    return on_step


def _attempt(make: Callable[[T], U], given: T) -> U | None:
    """A run of minutes must not end for a thumbnail."""
    try:
        return make(given)
    except Exception:
        log.warning("FastH3 Sampler: previews are off for this run", exc_info=True)
        return None


def _picture_maker(host: _host.Host) -> Callable[[torch.Tensor], Image.Image]:
    draft = _draft_decoder(host.model_roots("vae_approx"), host.device())
    if draft is not None:
        # the first calls on a device take long: now, and not in a step
        draft_preview(torch.zeros(1, 24, 1, 16, 16, device="cpu"), draft.decode)
        return lambda latent: draft_preview(latent, draft.decode)
    colours = newest_map(host.model_roots("vae"))
    return lambda latent: latent_preview(latent, colours)


def _draft_decoder(roots: list[Path], device: torch.device) -> DraftVAE | None:
    """The first taeh3 file, 10 to 23 MB; None without one, or if it is no such decoder."""
    for path in sorted(path for root in roots for path in root.glob(f"{_DRAFT}*.safetensors")):
        try:
            found = load_video_vae(path, "auto", device)
        except FastH3Error as error:
            log.warning("FastH3 Sampler: no previews from %s: %s", path.name, error)
            continue
        if isinstance(found, DraftVAE):
            return found
    return None
