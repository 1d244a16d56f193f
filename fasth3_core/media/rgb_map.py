"""The linear map from a latent to RGB that previews use: a built-in one, and least squares on what a VAE decoded."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..atomic import replacing
from ..packing.geometry import LATENT_PIXELS
from ..vae.chunks import CLIP_FRAMES, CLIP_LATENTS, FRAMES_PER_LATENT

EXPLAINED = 0.3
"""Below, a fit says more of a failed video than of the VAE, and is not kept."""
ENOUGH = 1000
"""Latent pixels for 25 unknowns; fewer explain themselves."""
SUFFIX = ".fasth3-preview.json"
"""Behind the name of the VAE's file that a map was fitted from."""
FORMAT = "fasth3-rgb-1"
_SAMPLED = 2
"""Latent of each clip that is fitted: from the middle, where no clip blends into another."""
_RIDGE = 0.01
"""Pull towards the built-in map, as a share of the mean square that normalised latents have: one video need not show
every colour."""

# per latent channel: red, green, blue, for values in [-1, 1]
_FACTORS = (
    (-0.018555, 0.024344, -0.017536), (0.150164, 0.137244, 0.129221), (0.027367, -0.050369, -0.208606),
    (-0.000793, -0.164622, -0.323161), (-0.048556, 0.013970, -0.074286), (0.011740, 0.014172, -0.006906),
    (0.061517, 0.061212, 0.110025), (0.035321, 0.086879, 0.110059), (-0.017426, 0.002997, 0.035356),
    (0.531539, 0.548819, 0.624404), (-0.024968, -0.040234, -0.034302), (-0.032549, -0.029096, -0.017221),
    (0.022609, 0.020286, 0.050661), (-0.084001, -0.038131, -0.020805), (-0.018830, 0.010412, 0.061120),
    (0.020777, 0.011196, -0.030994), (-0.008390, -0.012201, -0.025687), (-0.013281, -0.002924, 0.006331),
    (0.000260, 0.001833, -0.011038), (0.105471, 0.100482, 0.132106), (0.016529, 0.015213, 0.009999),
    (-0.014015, -0.017438, -0.019134), (-0.033787, -0.009984, -0.019725), (0.004224, 0.017284, 0.027196),
)
_BIAS = (0.057426, -0.022078, -0.071449)


@dataclass(frozen=True)
class RGBMap:
    """`weights` [25, 3] fp32: a row for each latent channel, and the constant."""

    weights: torch.Tensor

    def apply(self, latents_XC: torch.Tensor) -> torch.Tensor:
        """Normalised latents [..., 24] to RGB [..., 3] around [0, 1]; not clamped."""
        return latents_XC @ self.weights[:-1] + self.weights[-1]


def _built_in() -> RGBMap:
    values = torch.tensor([*_FACTORS, _BIAS], dtype=torch.float32, device="cpu") / 2
    values[-1] += 0.5
    return RGBMap(values)


BUILT_IN = _built_in()


@dataclass
class Fit:
    """Least squares over the clips of one decode, in sums of fixed size."""

    gram: torch.Tensor = field(default_factory=lambda: torch.zeros(25, 25, dtype=torch.float64, device="cpu"))
    products: torch.Tensor = field(default_factory=lambda: torch.zeros(25, 3, dtype=torch.float64, device="cpu"))
    squares: float = 0.0
    pixels: int = 0

    def add(self, latent: torch.Tensor, clip: int, frames_FHWC: torch.Tensor) -> None:
        """Take the frames of a clip, [17, H, W, 3] of the latent [1, 24, T, h, w], into account; a shorter clip is left
        out. Frames in [0, 1] on any device."""
        if len(frames_FHWC) < CLIP_FRAMES:
            return
        first = 1 + (_SAMPLED - 1) * FRAMES_PER_LATENT  # a clip's first latent stands for one frame
        mean_HWC = frames_FHWC[first : first + FRAMES_PER_LATENT].float().mean(dim=0)
        h, w = (side // LATENT_PIXELS for side in mean_HWC.shape[:2])
        rgb = mean_HWC.view(h, LATENT_PIXELS, w, LATENT_PIXELS, 3).mean(dim=(1, 3)).reshape(-1, 3).cpu().double()
        values = latent[0, :, clip * CLIP_LATENTS + _SAMPLED].detach().cpu().double().flatten(1).T
        rows = torch.cat([values, torch.ones_like(values[:, :1])], dim=1)
        self.gram += rows.T @ rows
        self.products += rows.T @ rgb
        self.squares += float(rgb.square().sum())
        self.pixels += len(rows)

    def solve(self) -> RGBMap:
        """The map, of one clip or more. Directions of which the clips showed little stay the built-in map's."""
        start = BUILT_IN.weights.double()
        ridge = _RIDGE * self.pixels * torch.eye(25, dtype=torch.float64, device="cpu")
        change = torch.linalg.solve(self.gram + ridge, self.products - self.gram @ start)
        return RGBMap((start + change).float())


    def is_good(self, rgb_map: RGBMap) -> bool:
        return self.pixels >= ENOUGH and self.explained(rgb_map) >= EXPLAINED

    def explained(self, rgb_map: RGBMap) -> float:
        """Share of the colours' variance that a map explains, at most 1: what is left is detail, and noise."""
        w, means = rgb_map.weights.double(), self.products[-1] / max(1, self.pixels)
        left = self.squares - 2 * float((w * self.products).sum()) + float((w * (self.gram @ w)).sum())
        return 1 - left / max(1e-9, self.squares - self.pixels * float(means.square().sum()))


def save(path: Path, rgb_map: RGBMap) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps({"format": FORMAT, "weights": rgb_map.weights.tolist()}), encoding="utf-8")


def load(path: Path) -> RGBMap | None:
    """A map of `save`, or None if the file holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        weights = torch.tensor(data["weights"], dtype=torch.float32, device="cpu")
        sound = data["format"] == FORMAT and weights.shape == (25, 3) and math.isfinite(float(weights.sum()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return RGBMap(weights) if sound else None
