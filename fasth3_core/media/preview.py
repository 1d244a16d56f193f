"""A picture of an unfinished video latent, from a linear map to RGB. Costs next to nothing and shows no detail."""

import torch
from PIL import Image

from .images import to_image

MAX_SIDE = 512
"""Longest side of a preview in pixels."""

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


def latent_preview(video_latent: torch.Tensor) -> Image.Image:
    """Preview of the middle frame of a normalised video latent [1, 24, T, h, w], at most MAX_SIDE pixels long.

    One latent pixel becomes up to 16 picture pixels, never more, so that small canvases are not blown up.
    """
    frame_CHW = video_latent[0, :, video_latent.shape[2] // 2].detach().float().cpu()
    factors, bias = (torch.tensor(values, dtype=torch.float32, device="cpu") for values in (_FACTORS, _BIAS))
    rgb_HWC = frame_CHW.movedim(0, -1) @ factors + bias
    small = to_image((rgb_HWC + 1) / 2)
    scale = min(16, MAX_SIDE / max(small.size))
    return small.resize((round(small.width * scale), round(small.height * scale)), Image.Resampling.BILINEAR)
