"""Model dimensions, read from the tensors, and the sparse-attention settings, checked once and then trusted."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import CheckpointError, ConfigError

TILE_SHAPES = {64: (4, 4, 4), 128: (4, 4, 8), 256: (4, 8, 8)}
"""Tokens per tile -> (frames, rows, columns) of the token grid."""

PATCH = 2
"""Latent pixels per token along height and width; along time it is 1."""

_DEFAULT_ROPE_FREQS = 16
"""Frequencies per axis of every released model; all of them have 128-wide heads."""

# the same dimension under the names that configuration files use
_OVERRIDE_NAMES = {
    "layers": "num_layers",
    "refiner_layers": "num_refiner_layers",
    "token_refiner_num_layers": "num_refiner_layers",
    "heads": "num_heads",
    "num_attention_heads": "num_heads",
    "attention_head_dim": "head_dim",
    "ffn_hidden_size": "ffn_dim",
    "latents_dim": "in_channels",
    "audio_latents_dim": "audio_in_channels",
    "timestep_input_dim": "freq_dim",
    "time_embed_hidden_size": "time_embed_hidden_dim",
    "rope_inv_freq_len": "rope_freq_dim",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTConfig:
    """Dimensions of one transformer. Build it with `from_shapes`; no size is assumed anywhere else."""

    hidden_size: int
    """Width of the residual stream (5376 in the releases; heads x head_dim is a different number)."""
    num_layers: int
    num_refiner_layers: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    """Width after SwiGLU; the fused first projection has twice as many rows."""
    in_channels: int
    """Video latent channels."""
    audio_in_channels: int
    text_dim: int
    freq_dim: int
    """Width of the sinusoidal time features; 0 for curve AdaLN, which has no time embedder."""
    time_embed_hidden_dim: int
    time_embed_dim: int
    """Width that the AdaLN linears (full form), the basis (rank form) or nothing (curve form) read."""
    rope_freq_dim: int
    """Frequencies per axis; 6 x this many head channels are rotated."""
    adaln: str
    """"full", "rank" (shared fp16 basis) or "curve" (fp32 table over time)."""
    adaln_rank: int | None
    """Inner width of the rank and curve forms."""
    has_gates: bool
    """Whether the blocks carry `to_gate_compress`, which only VSA students have."""
    output_heads: int
    """1, or the number of output heads in a head bank."""

    @property
    def inner_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def video_row_dim(self) -> int:
        """Features of one video token: channels x 2 x 2."""
        return self.in_channels * PATCH * PATCH

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], overrides: Mapping[str, Any] | None = None
    ) -> "DiTConfig":
        """Read the dimensions from canonical (single-file) tensor names.

        Args:
            shapes: canonical name -> shape.
            overrides: fields of a configuration file beside the weights. They win where the tensors are silent
                and must agree where the tensors speak.

        Raises:
            CheckpointError: a defining tensor is missing, or the configuration contradicts the tensors.
        """

        def shape(name: str) -> tuple[int, ...]:
            if name not in shapes:
                raise CheckpointError(f"not a MiniMax-H3 transformer: {name!r} is missing.")
            return tuple(shapes[name])

        given = {_OVERRIDE_NAMES.get(key, key): value for key, value in (overrides or {}).items()}
        hidden, video_row = shape("video_patch_proj.weight")
        head_dim = shape("blocks.0.attn.q_norm.weight")[0]
        curve = "adaln_t_table" in shapes
        rank = "adaln_basis.weight" in shapes
        if curve:
            freq_dim = time_hidden = 0
            time_dim = adaln_rank = shape("adaln_t_table")[1]
        else:
            time_hidden, freq_dim = shape("time_embedder.proj_in.weight")
            time_dim = shape("time_embedder.proj_out.weight")[0]
            adaln_rank = shape("adaln_basis.weight")[0] if rank else None
        if "rope.inv_freq" in shapes:
            rope = shape("rope.inv_freq")[0]
        elif given.get("rope_freq_dim"):
            rope = given["rope_freq_dim"]
            if type(rope) is not int:
                raise CheckpointError(f"the configuration says rope_freq_dim={rope!r}: expected a whole number.")
        elif head_dim == 128:
            rope = _DEFAULT_ROPE_FREQS
        else:
            raise CheckpointError(
                f"the file has no rope.inv_freq and its heads are {head_dim} wide: how many rotary frequencies it was "
                "trained with cannot be known. Put a config.json with rope_freq_dim beside the weights."
            )
        if not 0 < 6 * rope <= head_dim:
            raise CheckpointError(f"{rope} rotary frequencies need 6 x {rope} channels, but a head has {head_dim}.")
        config = cls(
            hidden_size=hidden,
            num_layers=_count(shapes, r"blocks\.([0-9]{1,3})\.norm1\.weight"),
            num_refiner_layers=_count(shapes, r"token_refiner\.blocks\.([0-9]{1,3})\.norm1\.weight"),
            num_heads=shape("blocks.0.attn.qkv_proj.weight")[0] // (3 * head_dim),
            head_dim=head_dim,
            ffn_dim=shape("blocks.0.mlp.fc2.weight")[1],
            in_channels=video_row // (PATCH * PATCH),
            audio_in_channels=shape("audio_patch_proj.weight")[1],
            text_dim=shape("condition_proj.weight")[1],
            freq_dim=freq_dim,
            time_embed_hidden_dim=time_hidden,
            time_embed_dim=time_dim,
            rope_freq_dim=rope,
            adaln="curve" if curve else "rank" if rank else "full",
            adaln_rank=adaln_rank,
            has_gates="blocks.0.attn.to_gate_compress.weight" in shapes,
            output_heads=shape("final_layer.video_out.weight")[0] // video_row,
        )
        # a table over time stands for the whole time embedder, of which the file then says nothing
        silent = ("freq_dim", "time_embed_hidden_dim", "time_embed_dim") if curve else ()
        for field in fields(config):
            said, is_ = given.get(field.name), getattr(config, field.name)
            speaks = type(is_) is int or field.name == "adaln_rank"
            if said is not None and speaks and field.name not in silent and said != is_:
                raise CheckpointError(
                    f"the configuration says {field.name}={said!r}, the tensors say {is_}: they are not of one model."
                )
        return config


def _count(shapes: Mapping[str, tuple[int, ...]], pattern: str) -> int:
    found = sorted(int(m.group(1)) for name in shapes if (m := re.fullmatch(pattern, name)))
    if found != list(range(len(found))):
        missing = sorted(set(range(found[-1] + 1)) - set(found))
        raise CheckpointError(f"blocks {missing} are missing: the file numbers its blocks up to {found[-1]}.")
    return len(found)


KEEP_RULES = ("contract", "sparsity", "top_k")
MODES = ("exempt", "compete")


@dataclass(frozen=True, kw_only=True, slots=True)
class VSAConfig:
    """Which video tiles each video query tile attends to. Text, audio and condition tokens stay dense."""

    keep_rule: str = "contract"
    """"contract" (as trained), "sparsity" (a fraction dropped) or "top_k" (an absolute number kept)."""
    sparsity: float = 0.9
    """Fraction of video tiles dropped per query tile, 0 <= sparsity < 1. Read with keep_rule "sparsity"."""
    top_k: int = 64
    """Video tiles kept per query tile, at least 1. Read with keep_rule "top_k"."""
    tile_size: int = 0
    """Tokens per tile: 64, 128 or 256; 0 takes the contract's."""
    mode: str = "exempt"
    """"exempt": prefix tiles are always visible. "compete": they compete with video tiles for the same places."""
    dense_first_steps: int = 0
    """Sampler steps at the start that run with every tile kept."""
    dense_layers: tuple[int, ...] = ()
    """Blocks that keep every tile at every step."""
    backend: str = "auto"
    """"auto", or the name of one attention backend, which must then run or raise."""

    def __post_init__(self) -> None:
        if self.keep_rule not in KEEP_RULES:
            raise ConfigError("keep_rule", self.keep_rule, f"one of {list(KEEP_RULES)}", "Use 'contract' if unsure.")
        if not 0.0 <= self.sparsity < 1.0:  # also refuses NaN
            raise ConfigError("sparsity", self.sparsity, "a fraction with 0 <= sparsity < 1", "0 keeps every tile.")
        if self.top_k < 1:
            raise ConfigError("top_k", self.top_k, "1 or more tiles", "Sparsity 0.9 keeps a tenth of the tiles.")
        if self.tile_size not in (0, *TILE_SHAPES):
            raise ConfigError("tile_size", self.tile_size, f"one of {sorted(TILE_SHAPES)}", "FastH3 was trained at 64.")
        if self.mode not in MODES:
            raise ConfigError("mode", self.mode, f"one of {list(MODES)}", "Use 'exempt', the trained one.")
        if self.dense_first_steps < 0:
            raise ConfigError("dense_first_steps", self.dense_first_steps, "0 or more", "Use 0, as trained.")
        if any(layer < 0 for layer in self.dense_layers):
            raise ConfigError("dense_layers", self.dense_layers, "block numbers from 0", "Leave it empty, as trained.")

    def resolved(self, *, sparsity: float, tile_size: int) -> "VSAConfig":
        """The same settings with what was left to the contract filled in."""
        config = self
        if config.keep_rule == "contract":
            config = replace(config, keep_rule="sparsity", sparsity=sparsity)
        if config.tile_size == 0:
            config = replace(config, tile_size=tile_size)
        return config

    def kept_tiles(self, num_video_tiles: int, step: int = 0, layer: int = 0) -> int:
        """Video tiles that each query tile keeps at this step and block; `num_video_tiles` means all of them.

        The product is taken in Python doubles on purpose: sparsity 0.95 of 660 tiles keeps 34, not 33.
        """
        if self.keep_rule == "contract":
            raise ValueError("kept_tiles needs a resolved VSAConfig; call resolved() first")
        if step < self.dense_first_steps or layer in self.dense_layers:
            return num_video_tiles
        keep = self.top_k if self.keep_rule == "top_k" else math.ceil((1 - self.sparsity) * num_video_tiles)
        return max(1, min(keep, num_video_tiles))
