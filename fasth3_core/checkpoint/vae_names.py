"""Names of the video VAE: diffusers' in memory, those or ComfyUI's ("single-file", also the official ones) on disk.

In memory q, k, v are three layers and the feed-forward is value-first. ComfyUI's `to_qkv` holds q, k, v of each head in
turn, its `w1` the gate half first. Any number of decoder blocks is read, and the encoder may be absent.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .kinds import Entry, Kind, Plan, Source
from .plan import make_plan
from .quant import QuantizedWeight
from .reading import MemorySource
from .recognise import require
from .rows import Group
from .shapes import Shapes, Size, Template, count
from .write import restore

LAYOUTS = ("diffusers", "single-file")

HEAD_DIM = 64
"""Width of a decoder head in every published file; tensors cannot say it, a configuration may."""

_DOWNSAMPLED = 4
"""Encoder stages that end in a downsampling convolution."""
_STAGES = 6

_BLOCK = "decoder.transformer_blocks"
_PLAIN = re.compile(
    r"encoder\.(conv_in|norm_out|conv_out)|quant_conv|post_quant_conv|decoder\.(norm_out|proj_out|register_tokens)"
    r"|latents_(mean|std)|decoder\.transformer_blocks\.\d+\.(norm[12]|scale[12])"
)
"""Layers with the same name in both layouts."""

# (diffusers, single-file) patterns of the renamed layers, each a match and what it becomes
_RENAMED = (
    (r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.(norm[12]|conv[12])", r"encoder.down.\1.block.\2.\3"),
    (r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.conv_shortcut", r"encoder.down.\1.block.\2.nin_shortcut"),
    (r"encoder\.down_blocks\.(\d+)\.downsamplers\.0\.conv", r"encoder.down.\1.downsample.conv"),
    (r"decoder\.proj_in", r"decoder.x_embedder"),
    (r"(decoder\.transformer_blocks\.\d+)\.attn\.to_out\.0", r"\1.attn.to_out"),
    (r"(decoder\.transformer_blocks\.\d+)\.attn\.to_[qkv]", r"\1.attn.to_qkv"),
    (r"(decoder\.transformer_blocks\.\d+)\.ff\.net\.0\.proj", r"\1.ff.w1"),
    (r"(decoder\.transformer_blocks\.\d+)\.ff\.net\.2", r"\1.ff.w2"),
)
_BACK = (
    (r"encoder\.down\.(\d+)\.block\.(\d+)\.(norm[12]|conv[12])", r"encoder.down_blocks.\1.resnets.\2.\3"),
    (r"encoder\.down\.(\d+)\.block\.(\d+)\.nin_shortcut", r"encoder.down_blocks.\1.resnets.\2.conv_shortcut"),
    (r"encoder\.down\.(\d+)\.downsample\.conv", r"encoder.down_blocks.\1.downsamplers.0.conv"),
    (r"decoder\.x_embedder", r"decoder.proj_in"),
    (r"(decoder\.transformer_blocks\.\d+)\.attn\.to_out", r"\1.attn.to_out.0"),
    (r"(decoder\.transformer_blocks\.\d+)\.attn\.to_qkv", r"\1.attn.to_q"),
    (r"(decoder\.transformer_blocks\.\d+)\.ff\.w1", r"\1.ff.net.0.proj"),
    (r"(decoder\.transformer_blocks\.\d+)\.ff\.w2", r"\1.ff.net.2"),
)


def _rename(layer: str, rules: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, replacement in rules:
        if match := re.fullmatch(pattern, layer):
            return match.expand(replacement)
    return None


def _canonical_of(layer: str, layout: str) -> str | None:
    if _PLAIN.fullmatch(layer):
        return layer
    if layout == "diffusers":
        return layer if _rename(layer, _RENAMED) else None
    return _rename(layer, _BACK)


def _group(canonical: str, layout: str) -> Group:
    if layout == "diffusers" or _PLAIN.fullmatch(canonical):
        return Group((canonical,), (canonical,))
    stored = _rename(canonical, _RENAMED)
    if stored.endswith(".to_qkv"):
        return Group(tuple(f"{stored[: -len('qkv')]}{part}" for part in "qkv"), (stored,), "heads")
    return Group((canonical,), (stored,), "swap" if stored.endswith(".w1") else "same")


def decoder_head_dim(config: Mapping[str, Any] | None) -> int:
    """Width of a decoder head: what a configuration beside the weights says, else that of every published file."""
    config = config or {}
    said = config.get("decoder_head_dim") or config.get("attention_head_dim") or HEAD_DIM
    if type(said) is not int:
        raise CheckpointError(f"the configuration says that a decoder head is {said!r} wide: expected a whole number.")
    return said


def _head_dim(canonical: str, entries: Mapping[str, Entry], config: Mapping[str, Any]) -> int:
    return decoder_head_dim(config)


def _templates(present: Shapes) -> tuple[Template, Template]:
    required: dict[str, tuple[Size, ...]] = {
        **_conv("post_quant_conv", "latent", "latent", 1),
        "decoder.register_tokens": (1, "registers", "width"),
        **_linear("decoder.proj_in", "width", "latent"),
        **_linear("decoder.norm_out", "width"),
        **_linear("decoder.proj_out", "patch", "width"),
    }
    for i in range(max(1, count(present, f"{_BLOCK}."))):
        block = f"{_BLOCK}.{i}"
        for name in ("norm1.weight", "norm2.weight", "scale1", "scale2"):
            required[f"{block}.{name}"] = ("width",)
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            required |= _linear(f"{block}.attn.{name}", "width", "width")
        required |= _linear(f"{block}.ff.net.0.proj", "2*ff", "width")
        required |= _linear(f"{block}.ff.net.2", "width", "ff")
    if any(name.startswith(("encoder.", "quant_conv.")) for name in present):
        required |= _encoder(present)
    return required, {"latents_mean": ("latent",), "latents_std": ("latent",)}


def _encoder(present: Shapes) -> dict[str, tuple[Size, ...]]:
    wanted: dict[str, tuple[Size, ...]] = {
        **_conv("quant_conv", "2*latent", "2*latent", 1),
        **_conv("encoder.conv_in", "c0", 3, 3),
        **_linear("encoder.norm_out", f"c{_STAGES}"),
        **_conv("encoder.conv_out", "2*latent", f"c{_STAGES}", 3),
    }
    for i in range(_STAGES):
        stage = f"encoder.down_blocks.{i}"
        entering, leaving = f"c{i}", f"c{i + 1}"
        for j in range(max(1, count(present, f"{stage}.resnets."))):
            resnet = f"{stage}.resnets.{j}"
            channels = entering if j == 0 else leaving
            wanted |= _linear(f"{resnet}.norm1", channels) | _conv(f"{resnet}.conv1", leaving, channels, 3)
            wanted |= _linear(f"{resnet}.norm2", leaving) | _conv(f"{resnet}.conv2", leaving, leaving, 3)
            shape = present.get(f"{resnet}.conv1.weight") or (0, 0)
            if shape[0] != shape[1]:
                wanted |= _conv(f"{resnet}.conv_shortcut", leaving, channels, 1)
        if i < _DOWNSAMPLED:
            wanted |= _conv(f"{stage}.downsamplers.0.conv", leaving, leaving, 3)
    return wanted


def _linear(name: str, rows: Size, *columns: Size) -> dict[str, tuple[Size, ...]]:
    return {f"{name}.weight": (rows, *columns), f"{name}.bias": (rows,)}


def _conv(name: str, rows: Size, columns: Size, kernel: int) -> dict[str, tuple[Size, ...]]:
    return _linear(name, rows, columns, kernel, kernel, kernel)


VIDEO_VAE = Kind(
    name="video VAE",
    title="MiniMax-H3 video VAE",
    canonical_of=_canonical_of,
    group=_group,
    templates=_templates,
    head_dim=_head_dim,
    aliases=(
        # decoders that are published alone leave out "decoder.", or call their blocks "blocks"
        (re.compile(r"^(?=(x_embedder|register_tokens|mask_token|norm_out|proj_in|proj_out|blocks)\b)"), "decoder."),
        (re.compile(r"^decoder\.blocks\."), "decoder.transformer_blocks."),
    ),
    ignored=frozenset({"decoder.mask_token", "pixel_mean", "pixel_std"}),
)


def plan_video_vae(source: Source) -> Plan:
    """Canonical tensors of a video VAE in either layout, described but not loaded."""
    prefix = require(source, "video VAE")
    ends = (".attn.to_q.weight", ".ff.net.2.weight", "decoder.proj_in.weight")
    split = any(name.endswith(ends) for name in source.tensors)
    return make_plan(source, VIDEO_VAE, "diffusers" if split else "single-file", prefix)


def decoder_blocks(plan: Plan) -> int:
    return count(plan.entries, f"{_BLOCK}.")


def to_canonical(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | QuantizedWeight]:
    """Convert tensors in memory, in their dtypes."""
    source = MemorySource(tensors)
    return plan_video_vae(source).load(source)


def from_canonical(tensors: Mapping[str, torch.Tensor | QuantizedWeight], layout: str) -> dict[str, torch.Tensor]:
    """The inverse: tensors under the names and in the row order of `layout`."""
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout {layout!r}: a video VAE has one of {list(LAYOUTS)}.")
    return restore(tensors, VIDEO_VAE, layout)
