"""What one tensor name of an adapter says: which layer, and what it does to it.

Names in the wild differ in what stands before the layer (several prefixes, some doubled), in the layer itself (this
package's two namings, or either with underscores for dots) and in how the two factors are called.
"""

import re
from dataclasses import dataclass

from ..checkpoint import names
from ..checkpoint.rows import Group

DOWN, UP, ALPHA, DIFF, DIFF_BIAS, SET = "down", "up", "alpha", "diff", "diff_b", "set_weight"

_LORA = r"[._]lora(?:_linear_layer)?[._]"
_ROLES = (
    (re.compile(r"\.diff_b$"), DIFF_BIAS),
    (re.compile(r"\.diff$"), DIFF),
    (re.compile(r"\.set_weight$"), SET),
    (re.compile(r"\.(?:lora_)?alpha$"), ALPHA),
    # the middle part is PEFT's name of the adapter: "default", or whatever its maker called it
    (re.compile(_LORA + r"(?:A|down)(?:\.(?!weight$|bias$)[\w-]+)?(?:\.weight)?$"), DOWN),
    (re.compile(_LORA + r"(?:B|up)(?:\.(?!weight$|bias$)[\w-]+)?(?:\.weight)?$"), UP),
)
_FOREIGN = (
    (re.compile(r"\.(dora_scale|lora_magnitude_vector(\..*)?)$"), "DoRA (magnitudes beside the factors)"),
    (re.compile(r"\.hada_\w+$"), "LoHa"),
    (re.compile(r"\.lokr_\w+$"), "LoKr"),
    (re.compile(r"\.(oft_\w+|boft_\w+|oft_R\..*)$"), "OFT"),
    (re.compile(r"\.lora_mid\.weight$"), "LoCon with a middle factor"),
    (re.compile(r"\.reshape_weight$"), "a LoRA that reshapes layers (a bank of output heads)"),
    (re.compile(_LORA + r"(B|up)(\.[\w-]+)?\.bias$"), "LoRA with biases"),
    (re.compile(r"\.(a1|a2|b1|b2)\.weight$"), "GLoRA"),
)
"""Forms that change weights by another rule than a product of two factors."""

_DOTTED_PREFIX = re.compile(r"^(?:base_model|model|diffusion_model|transformer|transformer_ref|unet|dit)\.")
_FLAT_PREFIX = re.compile(r"^(?:lora_unet|lora_transformer|lora_dit|lycoris|diffusion_model|transformer(?!_blocks))_")
_TEXT_ENCODER = re.compile(r"^(?:lora_te\d?[._]|te\d?[._]|text_encoder)")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a layer of an adapter lies in the transformer."""

    layer: str
    """As stored, without prefixes, in dotted form."""
    canonical: str
    """Canonical layer, which may hold the rows of several stored ones."""
    layout: str
    """"diffusers" or "single-file": whose row order the rows have."""
    part: int
    """Which of the equal parts of the canonical layer's rows: 0, 1, 2 for q, k, v; 0 where it is the only one."""

    def group(self, fused: str) -> Group:
        """The stored layers with the same rows, and the order of these; `fused` is the layout of a fused qkv."""
        return names.TRANSFORMER.group(self.canonical, self.layout if self.layout == "diffusers" else fused)


def role(name: str) -> tuple[str, str] | None:
    """(the name before it, what the tensor is) or None."""
    for pattern, found in _ROLES:
        if match := pattern.search(name):
            return name[: match.start()], found
    return None


def foreign(name: str) -> str | None:
    """The form of adapter that this tensor is the sign of, if it is one that is not read."""
    return next((what for pattern, what in _FOREIGN if pattern.search(name)), None)


def of_text_encoder(name: str) -> bool:
    return _TEXT_ENCODER.match(name) is not None


def locate(stem: str) -> Target | None:
    """The layer of the transformer that the name before the role means, or None."""
    while match := _DOTTED_PREFIX.match(stem):
        stem = stem[match.end() :]
    if (target := _of_layer(stem)) is not None:
        return target
    while match := _FLAT_PREFIX.match(stem):
        stem = stem[match.end() :]
        if (target := _of_layer(stem)) is not None:  # a flat prefix before a dotted name
            return target
    layer = names.dotted(stem)
    return None if layer is None else _of_layer(layer)


_SPLIT = re.compile(r"\.attn\.([qkv])_proj$")
_STACKS = (
    (re.compile(r"^blocks\."), "transformer_blocks."),
    (re.compile(r"^token_refiner\.blocks\."), "token_refiner.refiner_blocks."),
)


def _of_layer(layer: str) -> Target | None:
    spelled = f"{layer}."
    for pattern, replacement in names.TRANSFORMER.aliases:
        spelled = pattern.sub(replacement, spelled)
    layer = _SPLIT.sub(r".attn.to_\1", spelled[:-1])
    diffusers = layer
    for pattern, replacement in _STACKS:  # split names inside single-file blocks are those of diffusers in all but that
        diffusers = pattern.sub(replacement, diffusers)
    for name, layout in ((layer, "single-file"), (diffusers, "diffusers")):
        canonical = names.TRANSFORMER.canonical_of(name, layout)
        if canonical is not None:
            return Target(name, canonical, layout, names.TRANSFORMER.group(canonical, layout).source.index(name))
    return None
