"""A transformer from any layout into one single file in 8 bits, streamed: one tensor in memory at a time."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..adapters.weight import AdaptedWeight
from ..config import DiTConfig
from ..errors import CheckpointError
from ..model.blocks import inverse_frequencies
from .component import Component
from .dtypes import NAMES, TORCH
from .files import Stored
from .kinds import Plan, join, split
from .names import LAYOUT_KEY
from .quant import DEFAULT_GROUP, QuantizedWeight, Spec
from .quantise import quantise, spec_for
from .stream import write_stream

_ROPE = "rope.inv_freq"
"""Single files have it; diffusers files leave it to the configuration."""

_LARGE = re.compile(
    r"(token_refiner\.)?blocks\.\d+\.(attn\.(qkv_proj|out_proj|to_gate_compress)|mlp\.fc[12])"
)
"""Layers that take the time and the memory; what is quantised where nothing else is asked for."""
_ADALN = re.compile(r"blocks\.\d+\.adaln_proj\.linear")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which layers become what."""

    form: str
    """"int8" or "fp8"."""
    group: int = DEFAULT_GROUP
    """Input channels rotated together in int8; 0 for none."""
    adaln: bool = False
    """Whether the blocks' AdaLN of full width is quantised too: two fifths of the released model."""
    keep: re.Pattern[str] | None = None
    """Layers that stay float, by canonical name."""

    def spec(self, name: str, shape: tuple[int, ...], plan: Plan) -> Spec | None:
        """How a canonical tensor is quantised, or None if it stays as it is."""
        layer, leaf = split(name)
        if leaf != "weight" or len(shape) != 2:
            return None
        full = "adaln_t_table" not in plan.entries and "adaln_basis.weight" not in plan.entries
        wanted = _LARGE.fullmatch(layer) or (self.adaln and full and _ADALN.fullmatch(layer))
        if not wanted or (self.keep is not None and self.keep.search(layer)):
            return None
        return spec_for(self.form, shape[1], self.group)


@dataclass(frozen=True, slots=True)
class Converted:
    """One layer that was quantised."""

    layer: str
    spec: Spec
    shape: tuple[int, ...]
    loss: float
    """Norm of the error over the norm of the weight."""


def convert(
    component: Component,
    plan: Plan,
    path: Path,
    choice: Choice,
    metadata: Mapping[str, str] | None = None,
    *,
    device: torch.device | str = "cpu",
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    on_layer: Callable[[Converted], None] = lambda layer: None,
) -> list[Converted]:
    """Write the transformer that `plan` describes to `path`, in ComfyUI's single-file form.

    Args:
        on_bytes: (bytes read, bytes in all).

    Raises:
        CheckpointError: it is quantised already, nothing is left to quantise, or a value is not finite.
    """
    if plan.quantised:
        raise CheckpointError(
            f"{component.label}: {len(plan.quantised)} of its layers are quantised already, and rounding twice loses "
            "more. Start from the bf16 file of the same release."
        )
    config = DiTConfig.from_shapes(plan.shapes, component.config)
    specs = {name: choice.spec(name, entry.shape, plan) for name, entry in plan.entries.items()}
    if not any(specs.values()):
        raise CheckpointError(f"{component.label}: none of its layers is left to quantise.")
    done: list[Converted] = []
    total = sum(entry.nbytes(None) for entry in plan.entries.values())
    seen = 0

    def on_piece(count: int) -> None:
        nonlocal seen
        seen += count
        on_bytes(seen, total)

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        with torch.inference_mode(False), torch.no_grad(), component.open(device, on_piece) as reader:
            for name, entry in plan.entries.items():
                value, spec = entry.load(reader), specs[name]
                if isinstance(value, AdaptedWeight):  # kept beside a float weight, where the adapter was asked to be
                    value = value.dequantise(TORCH[entry.dtype])
                if not bool(torch.isfinite(value).all()):
                    raise CheckpointError(f"{component.label}: {name} holds values that are not finite.")
                if spec is not None:
                    made, loss = quantise(value, spec)
                    done.append(Converted(split(name)[0], spec, tuple(made.shape), loss))
                    on_layer(done[-1])
                    yield from _parts(name, made)
                else:
                    yield name, _residual_heads(name, value, config.output_heads) if absolute else value
            if _ROPE not in plan.entries:
                yield _ROPE, inverse_frequencies(config.rope_freq_dim)

    absolute = plan.layout == "diffusers"
    header = {LAYOUT_KEY: "single-file", **(metadata or {})}
    write_stream(path, _layout(plan, specs, config), values(), header)
    return done


def _layout(plan: Plan, specs: Mapping[str, Spec | None], config: DiTConfig) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for name, entry in plan.entries.items():
        spec = specs[name]
        if spec is None:
            stored[name] = Stored(entry.dtype, entry.shape)
            continue
        blank = QuantizedWeight(
            torch.empty(entry.shape, dtype=_dtype(spec), device="meta"),
            torch.empty(entry.shape[0], 1, dtype=torch.float32, device="meta"), spec.format, spec.group,
        )  # fmt: skip
        stored |= {part: Stored(NAMES[t.dtype], tuple(t.shape)) for part, t in _parts(name, blank)}
    if _ROPE not in stored:
        stored[_ROPE] = Stored("F32", (config.rope_freq_dim,))
    return stored


def _dtype(spec: Spec) -> torch.dtype:
    return torch.int8 if spec.format == "int8_tensorwise" else getattr(torch, spec.format)


def _parts(name: str, value: QuantizedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a file has for one quantised weight."""
    layer = split(name)[0]
    yield name, value.data
    # the same in every row for float8, for which ComfyUI takes one number
    yield join(layer, "weight_scale"), value.scale if value.format == "int8_tensorwise" else value.scale[0, 0]
    yield join(layer, "comfy_quant"), value.spec.marker()


def _residual_heads(name: str, value: torch.Tensor, heads: int) -> torch.Tensor:
    """A bank of output heads as single files have it: head 0, and what the others differ from it by."""
    if heads == 1 or not name.startswith(("final_layer.video_out.", "final_layer.audio_out.")):
        return value
    bank = value.float().view(heads, -1, *value.shape[1:])
    return torch.cat([bank[:1], bank[1:] - bank[:1]]).view_as(value).to(value.dtype)


def mean_loss(layers: list[Converted]) -> float:
    """Root mean square of the layers' relative losses, each weighted by its size."""
    total = sum(math.prod(layer.shape) for layer in layers)
    return math.sqrt(sum(math.prod(layer.shape) * layer.loss**2 for layer in layers) / total)
