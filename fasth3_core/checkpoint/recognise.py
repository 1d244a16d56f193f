"""What a file is, from its names, so that a file in the wrong slot is told where it belongs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import CheckpointError
from .kinds import Source


@dataclass(frozen=True, slots=True)
class Sort:
    """One kind of file that people load."""

    name: str
    what: str
    place: str
    """Where it belongs, as the end of a sentence."""
    prefixes: tuple[str, ...]
    marks: tuple[frozenset[str], ...]
    """Names of which all of one set are there."""


def _marks(*sets: Iterable[str]) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(names) for names in sets)


SORTS = (
    Sort(
        "transformer",
        "a MiniMax-H3 transformer",
        "belongs in FastH3 Load Model",
        ("", "diffusion_model.", "model.diffusion_model.", "model.", "transformer."),
        _marks(
            ("video_patch_proj.weight",), ("audio_patch_proj.weight",), ("audio_proj_in.weight",),
            ("blocks.0.attn.qkv_proj.weight", "blocks.0.mlp.fc1.weight"),
        ),
    ),
    Sort(
        "video VAE",
        "the MiniMax-H3 video VAE",
        "belongs in FastH3 Load VAE, as video_vae",
        ("", "vae.", "first_stage_model.", "model."),
        _marks(
            ("decoder.transformer_blocks.0.scale1",), ("decoder.blocks.0.scale1",), ("blocks.0.scale1",),
            ("encoder.down_blocks.0.resnets.0.conv1.weight", "quant_conv.weight"),
            ("encoder.down.5.block.0.conv1.weight",),
        ),
    ),
    Sort(
        "audio VAE",
        "the MiniMax-H3 audio VAE",
        "belongs in FastH3 Load VAE, as audio_vae",
        ("", "audio_vae.", "vae.", "first_stage_model.", "model."),
        _marks(("pre_block.attn.zero_k_bias",), ("pre_block.attn.q_bias",), ("dec_in_proj.weight",)),
    ),
    Sort(
        "text encoder",
        "a text encoder",
        "belongs in ComfyUI's CLIPLoader",
        ("",),
        _marks(
            ("model.layers.0.self_attn.q_proj.weight",), ("model.language_model.layers.0.self_attn.q_proj.weight",),
            ("language_model.model.layers.0.self_attn.q_proj.weight",), ("layers.0.self_attn.q_proj.weight",),
            ("transformer.model.layers.0.self_attn.q_proj.weight",),
        ),
    ),
    Sort(
        "prompt embeddings",
        "a file of prompt embeddings",
        "belongs in FastH3 Load Prompt Embeds",
        ("",),
        _marks(("text_states", "token_tags")),
    ),
    Sort(
        "preview decoder",
        "a tiny preview decoder (taeh3)",
        "only makes previews and is no VAE to decode with",
        ("", "taehv."),
        _marks(("decoder.1.weight", "encoder.0.weight"), ("decoder.3.conv.0.weight",)),
    ),
)

_ADAPTER = re.compile(
    r"[._]lora(_linear_layer)?[._](A|B|up|down|mid)(\.|$)|\.(diff|diff_b|set_weight|dora_scale)$|\.(hada|lokr|oft|boft)_\w+$"
)
"""In the names of adapters of every form, those that are not read included."""


def recognise(names: Iterable[str], metadata: Mapping[str, str]) -> tuple[str, str]:
    """(name of the sort, prefix of its names); ("unknown", "") if it is none."""
    names = set(names)
    if metadata.get("format", "").startswith("fastvideo-lora") or any(map(_ADAPTER.search, names)):
        return "adapter", ""
    for sort in SORTS:
        for prefix in sort.prefixes:
            if any(all(prefix + name in names for name in marks) for marks in sort.marks):
                return sort.name, prefix
    return "unknown", ""


def require(source: Source, wanted: str) -> str:
    """The prefix of the names, if `source` is of the sort that is wanted.

    Raises:
        CheckpointError: it is something else; says what, and where that belongs.
    """
    found, prefix = recognise(source.tensors, source.metadata)
    if found == wanted:
        return prefix
    sorts = {sort.name: sort for sort in SORTS}
    what = sorts[wanted].what.split(" ", 1)[1]
    if found in sorts:
        other = sorts[found]
        raise CheckpointError(f"{source.label}: this is {other.what}, not the {what}; it {other.place}.")
    if found == "adapter":
        raise CheckpointError(
            f"{source.label}: this is an adapter (LoRA), which changes a model and is none. "
            f"Load the {what} it was made for, and apply this file to it with FastH3 Apply Adapter."
        )
    some = ", ".join(sorted(source.tensors)[:4]) or "none at all"
    raise CheckpointError(
        f"{source.label}: not a {what}; none of its {len(source.tensors)} tensors is known (e.g. {some}). "
        "Choose another file."
    )
