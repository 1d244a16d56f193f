"""Tiny VAE decoders whose weights are made by hand, so that noise latents become something to look at and listen to.

Every tensor has the name and the place of the released decoders; only the sizes are small.
"""

import itertools
import math

import torch

from ..fasth3_core.vae.latents import AUDIO_MEAN, AUDIO_STD, VIDEO_MEAN, VIDEO_STD

HEAD_DIM = 64
_CORNERS = tuple(itertools.product((-1.0, 1.0), repeat=3))
"""(t, h, w) ends of one token's patch: one attention head looks at each."""
_AXIS_PAIRS = HEAD_DIM // 8
_FREQUENCIES = 100.0 ** (-torch.arange(_AXIS_PAIRS) / _AXIS_PAIRS)
_FOCUS = ((0, 0, 0, 1, 1, 1, 0, 0), (0.5, 1, 1, 0.5, 0, 0, 0, 0), (0.5, 1, 1, 0.5, 0, 0, 0, 0))
"""Weight of each rotary frequency on t, h and w: high ones see sharply, low ones far."""
_TILE_TOKENS = (7, 16, 16)
"""Of a clip's 256-pixel tile; canvases of at least 256 pixels a side have no others."""
_CONTRAST = 5.5
_PEDESTAL = 0.5
"""Constant part of every token, subtracted again at the end: with it, the last norm scales all tokens alike."""


def video_decoder(seed: int) -> dict[str, torch.Tensor]:
    """Diffusers names. Each head averages the latents around one corner of its token's patch, and the patch is filled
    by interpolation between its corners, so neighbouring patches meet and the picture is smooth in space and time."""
    generator = torch.Generator().manual_seed(seed)
    width = len(_CORNERS) * HEAD_DIM
    block = "decoder.transformer_blocks.0."
    mean, std = torch.tensor(VIDEO_MEAN), torch.tensor(VIDEO_STD)
    queries, keys = zip(*(_looking_at(corner) for corner in _CORNERS), strict=True)
    mix = torch.randn(HEAD_DIM, width, generator=generator) / math.sqrt(width)
    fill = _fill_patch(generator)
    pedestal = torch.tensor([1.0, -1.0]).repeat(width // 2)
    return {
        "post_quant_conv.weight": torch.diag(1 / std).view(24, 24, 1, 1, 1),
        "post_quant_conv.bias": -mean / std,
        "decoder.proj_in.weight": 0.01 * torch.randn(width, 24, generator=generator),
        "decoder.proj_in.bias": torch.zeros(width),
        "decoder.register_tokens": torch.zeros(1, 4, width),
        f"{block}norm1.weight": torch.ones(width),
        f"{block}attn.to_q.weight": torch.zeros(width, width),
        f"{block}attn.to_q.bias": torch.cat(queries),
        f"{block}attn.to_k.weight": torch.zeros(width, width),
        f"{block}attn.to_k.bias": torch.cat(keys),
        f"{block}attn.to_v.weight": mix.repeat(len(_CORNERS), 1),
        f"{block}attn.to_v.bias": torch.zeros(width),
        f"{block}attn.to_out.0.weight": torch.eye(width),
        f"{block}attn.to_out.0.bias": _PEDESTAL * pedestal,
        f"{block}scale1": torch.full((width,), 50.0),
        f"{block}norm2.weight": torch.ones(width),
        f"{block}ff.net.0.proj.weight": torch.zeros(16, width),
        f"{block}ff.net.0.proj.bias": torch.zeros(16),
        f"{block}ff.net.2.weight": torch.zeros(width, 8),
        f"{block}ff.net.2.bias": torch.zeros(width),
        f"{block}scale2": torch.zeros(width),
        "decoder.norm_out.weight": torch.ones(width),
        "decoder.norm_out.bias": torch.zeros(width),
        "decoder.proj_out.weight": fill,
        "decoder.proj_out.bias": -fill @ pedestal,
    }


def _looking_at(corner: tuple[float, float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of query and key that make attention depend on the distance to a corner of the query's patch alone."""
    weights, angles = [], []
    for axis, side in enumerate(corner):
        shift = side / _TILE_TOKENS[axis]  # half a token, in the coordinates -1 ... 1 of a tile
        weights.append(torch.tensor(_FOCUS[axis]))
        angles.append(2 * math.pi * shift * _FREQUENCIES)
    idle = HEAD_DIM // 2 - 3 * _AXIS_PAIRS
    amplitude = torch.cat([*weights, torch.zeros(idle)]).sqrt()
    angle = torch.cat([*angles, torch.zeros(idle)])
    half = 3 * _AXIS_PAIRS
    query, key = torch.zeros(HEAD_DIM), torch.zeros(HEAD_DIM)
    query[:half], query[half : 2 * half] = (amplitude * angle.cos())[:half], (amplitude * angle.sin())[:half]
    key[:half] = amplitude[:half]
    return query, key


def _fill_patch(generator: torch.Generator) -> torch.Tensor:
    """[3 * 4 * 16 * 16, heads * HEAD_DIM]: colour of every pixel of a patch from the features at its eight corners."""
    colours = _CONTRAST * torch.randn(3, HEAD_DIM, generator=generator) / math.sqrt(HEAD_DIM)
    near = [(torch.arange(size) + 0.5) / size for size in (4, 16, 16)]
    parts = []
    for corner in _CORNERS:
        along = [u if side > 0 else 1 - u for u, side in zip(near, corner, strict=True)]
        share = torch.einsum("t,h,w->thw", *along)
        parts.append(torch.einsum("cd,thw->cthwd", colours, share).reshape(-1, HEAD_DIM))
    return torch.cat(parts, dim=1)


_UP_KERNELS = ((5, 9), (5, 9), (2, 4), (2, 4), (2, 4), (2, 4), (2, 4))
"""(rate, taps) of the seven upsampling stages: 800 samples for each latent."""
_RESBLOCK_TAPS = (3, 7, 11)
_PITCH = 35.0
"""Turns of the sound's phase for a step of one in the smoothed latents: sets how high it sings."""
_LOUDNESS = 0.4


def audio_decoder(seed: int) -> dict[str, torch.Tensor]:
    """Diffusers names, weight norm folded. The stages only interpolate the latents to the sample rate; the last
    activation turns that slow curve into the phase of a sine, so each channel glides up and down like a theremin."""
    generator = torch.Generator().manual_seed(seed)
    stages, width = len(_UP_KERNELS), 2 ** len(_UP_KERNELS)
    mean, std = torch.tensor(AUDIO_MEAN), torch.tensor(AUDIO_STD)
    mix = torch.randn(width, 32, generator=generator) / math.sqrt(32)
    tensors = {
        "dec_in_proj.weight": (mix / std)[..., None],
        "dec_in_proj.bias": -mix @ (mean / std),
        "decoder.conv_pre.weight": _smooth(torch.eye(width), 7),
        "decoder.conv_pre.bias": torch.zeros(width),
    }
    for i, (rate, taps) in enumerate(_UP_KERNELS):
        narrow = 2 ** (stages - i - 1)
        halves = torch.eye(narrow).repeat(2, 1) / math.sqrt(2)  # keeps the size of the signal
        tensors |= {
            f"decoder.ups.{i}.0.weight": _smooth(halves, taps) * rate,
            f"decoder.ups.{i}.0.bias": torch.zeros(narrow),
        }
        for j, block_taps in enumerate(_RESBLOCK_TAPS):
            tensors |= _silent_block(f"decoder.resblocks.{len(_RESBLOCK_TAPS) * i + j}", narrow, block_taps)
    post = torch.zeros(1, 1, 7)
    post[0, 0, 0], post[0, 0, 6] = -_LOUDNESS, _LOUDNESS  # a difference: neither offset nor the slow curve is heard
    return tensors | {
        "decoder.activation_post.act.alpha": torch.full((1,), math.log(math.pi * _PITCH)),
        "decoder.activation_post.act.beta": torch.zeros(1),
        "decoder.conv_post.weight": post,
    }


def _smooth(mix: torch.Tensor, taps: int) -> torch.Tensor:
    """[A, B] -> [A, B, taps]: the same mix at every tap, under a window of sum 1."""
    window = torch.hann_window(taps + 2, periodic=False)[1:-1]
    return mix[..., None] * (window / window.sum())


def _silent_block(name: str, width: int, taps: int) -> dict[str, torch.Tensor]:
    """A residual block that adds nothing."""
    tensors = {}
    for i, part in itertools.product(range(3), ("convs1", "convs2")):
        tensors |= {
            f"{name}.{part}.{i}.weight": torch.zeros(width, width, taps),
            f"{name}.{part}.{i}.bias": torch.zeros(width),
        }
    for i in range(6):
        tensors |= {f"{name}.activations.{i}.act.{part}": torch.zeros(width) for part in ("alpha", "beta")}
    return tensors
