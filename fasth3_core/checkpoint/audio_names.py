"""Names of the audio VAE: the same in every layout; what differs is weight norm.

In memory weights are plain. Diffusers files store the convolutions as direction and magnitude (`weight_v`, `weight_g`),
which are multiplied out in fp32 when they are read. ComfyUI's file has plain weights and the latent statistics.
"""

import re
from collections.abc import Mapping

import torch

from ..errors import CheckpointError
from .kinds import Entry, Kind, Plan, Source, split
from .plan import make_plan
from .reading import MemorySource
from .recognise import require
from .rows import Group, row_norms
from .shapes import Shapes, Size, Template

LAYOUTS = ("diffusers", "single-file")

_STRIDES = (2, 4, 4, 5, 5)
_UP_KERNELS = (9, 9, 4, 4, 4, 4, 4)
_RESBLOCK_KERNELS = (3, 7, 11)
_DILATIONS = 3
_FILTER = 12

_NORMED = re.compile(
    r"(encoder\.block\..*|decoder\.(conv_pre|conv_post|ups\.\d+\.0|resblocks\.\d+\.convs[12]\.\d+))\.weight"
)
"""Weights that diffusers stores with weight norm: every convolution of the encoder and of the vocoder."""


def _templates(present: Shapes) -> tuple[Template, Template]:
    required = _vocoder()
    if not present or any(name.startswith(("encoder.", "pre_block.", "mean_proj.")) for name in present):
        required |= _encoder() | _pre_block()
    filters = {
        f"{activation}.{name}": (1, 1, _FILTER)
        for activation in _activations()
        for name in ("upsample.filter", "downsample.lowpass.filter")
    }
    statistics = {"latents_mean": ("latent",), "latents_std": ("latent",)}
    return required, {**filters, **statistics, "pre_block.attn.zero_k_bias": ("width",)}


def _encoder() -> dict[str, tuple[Size, ...]]:
    wanted = _layer("encoder.block.0", "enc", 1, 7)
    for i, stride in enumerate(_STRIDES):
        stage, narrow, wide = f"encoder.block.{i + 1}.block", f"{2**i}*enc", f"{2 ** (i + 1)}*enc"
        for unit in range(_DILATIONS):
            block = f"{stage}.{unit}.block"
            wanted |= {f"{block}.0.alpha": (1, narrow, 1), f"{block}.2.alpha": (1, narrow, 1)}
            wanted |= _layer(f"{block}.1", narrow, narrow, 7) | _layer(f"{block}.3", narrow, narrow, 1)
        wanted[f"{stage}.3.alpha"] = (1, narrow, 1)
        wanted |= _layer(f"{stage}.4", wide, narrow, 2 * stride)
    widest = f"{2 ** len(_STRIDES)}*enc"
    wanted["encoder.block.6.alpha"] = (1, widest, 1)
    return wanted | _layer("encoder.block.7", "width", widest, 3)


def _pre_block() -> dict[str, tuple[Size, ...]]:
    wanted: dict[str, tuple[Size, ...]] = {
        "pre_block.attn.qkv.weight": ("3*width", "width"),
        "pre_block.attn.q_bias": ("width",),
        "pre_block.attn.v_bias": ("width",),
    }
    for name, sizes in {
        "norm1": ("width",), "norm3": ("width",), "norm2": ("latent",), "proj": ("latent", "width"),
        "attn.proj": ("latent", "latent"), "mlp.norm": ("latent",), "mlp.w0": ("mlp", "latent"),
        "mlp.w1": ("mlp", "latent"), "mlp.w2": ("latent", "mlp"),
    }.items():  # fmt: skip
        wanted |= _layer(f"pre_block.{name}", *sizes)
    for name in ("mean_proj", "logs_proj"):
        wanted |= _layer(name, "latent", "latent", 1)
    return wanted


def _vocoder() -> dict[str, tuple[Size, ...]]:
    stages = len(_UP_KERNELS)
    wanted = _layer("dec_in_proj", "width", "latent", 1) | _layer("decoder.conv_pre", f"{2**stages}*dec", "width", 7)
    for i, kernel in enumerate(_UP_KERNELS):
        wide, narrow = f"{2 ** (stages - i)}*dec", f"{2 ** (stages - i - 1)}*dec"
        # a transposed convolution: its bias has the length of the second axis
        wanted |= {f"decoder.ups.{i}.0.weight": (wide, narrow, kernel), f"decoder.ups.{i}.0.bias": (narrow,)}
        for j, width in enumerate(_RESBLOCK_KERNELS):
            block = f"decoder.resblocks.{len(_RESBLOCK_KERNELS) * i + j}"
            for k in range(_DILATIONS):
                wanted |= _layer(f"{block}.convs1.{k}", narrow, narrow, width)
                wanted |= _layer(f"{block}.convs2.{k}", narrow, narrow, width)
            for k in range(2 * _DILATIONS):
                wanted |= _snake(f"{block}.activations.{k}", narrow)
    return wanted | _snake("decoder.activation_post", "dec") | {"decoder.conv_post.weight": (1, "dec", 7)}


def _activations() -> list[str]:
    blocks = len(_UP_KERNELS) * len(_RESBLOCK_KERNELS)
    inner = [f"decoder.resblocks.{n}.activations.{k}" for n in range(blocks) for k in range(2 * _DILATIONS)]
    return [*inner, "decoder.activation_post"]


def _snake(name: str, channels: Size) -> dict[str, tuple[Size, ...]]:
    return {f"{name}.act.alpha": (channels,), f"{name}.act.beta": (channels,)}


def _layer(name: str, rows: Size, *columns: Size) -> dict[str, tuple[Size, ...]]:
    return {f"{name}.weight": (rows, *columns), f"{name}.bias": (rows,)}


_LAYERS = {split(name)[0] for template in _templates({}) for name in template}


def _canonical_of(layer: str, layout: str) -> str | None:
    return layer if layer in _LAYERS else None


def _group(canonical: str, layout: str) -> Group:
    return Group((canonical,), (canonical,))


def _head_dim(canonical: str, entries: Mapping[str, Entry], config: Mapping) -> int:
    raise AssertionError("no layer of the audio VAE is stored head by head")


AUDIO_VAE = Kind(
    name="audio VAE",
    title="MiniMax-H3 audio VAE",
    canonical_of=_canonical_of,
    group=_group,
    templates=_templates,
    head_dim=_head_dim,
    aliases=(
        (re.compile(r"\.(weight_v|parametrizations\.weight\.original1)$"), ".weight"),
        (re.compile(r"\.parametrizations\.weight\.original0$"), ".weight_g"),
    ),
)


def plan_audio_vae(source: Source) -> Plan:
    """Canonical tensors of an audio VAE in either layout, described but not loaded."""
    prefix = require(source, "audio VAE")
    normed = any(name.endswith((".weight_g", ".original0")) for name in source.tensors)
    return make_plan(source, AUDIO_VAE, "diffusers" if normed else "single-file", prefix)


def to_canonical(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert tensors in memory: in their dtypes, but weights under weight norm come out in fp32."""
    source = MemorySource(tensors)
    return plan_audio_vae(source).load(source)


def from_canonical(tensors: Mapping[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The inverse. Under weight norm the direction is the weight and the magnitude its norm: it reads back exactly."""
    if layout == "single-file":
        return dict(tensors)
    if layout != "diffusers":
        raise CheckpointError(f"layout {layout!r}: an audio VAE has one of {list(LAYOUTS)}.")
    out = {}
    for name, tensor in tensors.items():
        if _NORMED.fullmatch(name):
            out[f"{name}_v"], out[f"{name}_g"] = tensor, row_norms(tensor.float()).to(tensor.dtype)
        else:
            out[name] = tensor
    return out
