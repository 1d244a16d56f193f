"""What a request will need, computed from headers and sizes before anything is loaded.

Bytes are those of this package's own buffers, named one by one, so that a wrong estimate shows which line is wrong.
"""

from dataclasses import asdict, dataclass
from typing import Any

from .config import PATCH, DiTConfig, VSAConfig
from .model.blocks import FF_ROWS
from .model.time import BLOCK_ROWS
from .packing.geometry import FPS, LATENT_PIXELS, audio_latents, check_size, latent_frames
from .vsa.tiles import tile_plan


@dataclass(frozen=True, kw_only=True)
class Plan:
    width: int
    height: int
    frames: int
    text_tokens: int
    audio_tokens: int
    video_tokens: int
    tokens: int
    """The packed sequence, conditions not counted."""
    forwards: int
    tile_size: int | None
    """None for dense attention."""
    prefix_tiles: int
    video_tiles: int
    kept_tiles: int
    """Video tiles that each query tile keeps in a sparse block."""
    tile_fill: float
    """Video tokens over the slots of their tiles: 1.0 when the grid divides by the tile."""
    sparse_steps: int
    weight_bytes: int
    """On the device, resident."""
    activation_bytes: int
    """Largest at once during a forward, on top of the weights, without the attention backend's own buffers."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        lines = [
            f"{self.width}x{self.height}, {self.frames} frames ({self.frames / FPS:.2f} s): {self.tokens:,} tokens = "
            f"{self.text_tokens:,} text + {self.audio_tokens:,} audio + {self.video_tokens:,} video",
        ]
        if self.tile_size is None:
            lines.append(f"dense attention in all {self.forwards} forwards")
        else:
            lines.append(
                f"tiles of {self.tile_size}: {self.prefix_tiles} prefix + {self.video_tiles} video, "
                f"{self.tile_fill:.0%} filled; each query tile keeps {self.kept_tiles} of {self.video_tiles}; "
                f"{self.sparse_steps} of {self.forwards} forwards sparse"
            )
        lines.append(
            f"device memory: weights {self.weight_bytes / 2**30:.2f} GiB + activations "
            f"{self.activation_bytes / 2**30:.2f} GiB"
        )
        return "\n".join(lines)


def plan(
    *,
    width: int,
    height: int,
    frames: int,
    text_tokens: int,
    forwards: int,
    config: DiTConfig,
    vsa: VSAConfig | None,
    weight_bytes: int,
    element_size: int,
) -> Plan:
    """Count tokens, tiles and bytes of a plain text-to-video request.

    Args:
        width, height: pixels, multiples of 32.
        frames: 17k + 5.
        vsa: resolved settings, or None for dense attention.
        weight_bytes: of the resident weights.
        element_size: bytes per activation element (2 for bf16).

    Raises:
        GeometryError: sizes that the model does not take; the message names the nearest legal ones.
    """
    check_size(width, height)
    grid = (latent_frames(frames), height // LATENT_PIXELS // PATCH, width // LATENT_PIXELS // PATCH)
    audio = 2 * audio_latents(frames)
    video = grid[0] * grid[1] * grid[2]
    tokens = text_tokens + audio + video
    prefix_tiles = video_tiles = kept = sparse_steps = 0
    fill = 1.0
    if vsa is not None:
        tiles = tile_plan((text_tokens, 0, audio), grid, vsa.tile_size)
        prefix_tiles, video_tiles = tiles.num_prefix_tiles, tiles.num_video_tiles
        kept = vsa.kept_tiles(video_tiles, step=vsa.dense_first_steps)
        fill = video / (video_tiles * vsa.tile_size)
        sparse_steps = forwards - min(forwards, vsa.dense_first_steps) if kept < video_tiles else 0
    return Plan(
        width=width,
        height=height,
        frames=frames,
        text_tokens=text_tokens,
        audio_tokens=audio,
        video_tokens=video,
        tokens=tokens,
        forwards=forwards,
        tile_size=None if vsa is None else vsa.tile_size,
        prefix_tiles=prefix_tiles,
        video_tiles=video_tiles,
        kept_tiles=kept,
        tile_fill=fill,
        sparse_steps=sparse_steps,
        weight_bytes=weight_bytes,
        activation_bytes=_activation_bytes(tokens, config, element_size, gated=vsa is not None),
    )


def _activation_bytes(tokens: int, config: DiTConfig, element: int, gated: bool) -> int:
    stream = tokens * config.hidden_size * element
    inner = tokens * config.inner_dim * element
    # residual stream and normed tokens, then q, k, v (gate), the attention's output and its projection
    attention = 2 * stream + (4 + gated) * inner + stream
    rows = min(tokens, FF_ROWS)
    # residual stream, normed tokens, output, and one pass of the feed-forward: both halves and their product
    feed_forward = 3 * stream + rows * 3 * config.ffn_dim * element
    return max(attention, feed_forward)


def released(gates: bool) -> DiTConfig:
    """Dimensions of the released 50-block model."""
    return DiTConfig(
        hidden_size=5376, num_layers=50, num_refiner_layers=2, num_heads=56, head_dim=128, ffn_dim=14336,
        in_channels=24, audio_in_channels=32, text_dim=5120, freq_dim=256, time_embed_hidden_dim=5376,
        time_embed_dim=2688, rope_freq_dim=16, adaln="full", adaln_rank=None, has_gates=gates, output_heads=1,
    )


def num_parameters(config: DiTConfig) -> int:
    """Of a transformer, the AdaLN of every block included."""
    C, inner = config.hidden_size, config.inner_dim
    attention = 4 * inner * C + 2 * config.head_dim
    refiner_block = attention + 3 * config.ffn_dim * C + 2 * C
    adaln_in = _adaln_inputs(config)
    block = refiner_block + BLOCK_ROWS * C * (adaln_in + 1) + config.has_gates * inner * C
    rows = config.video_row_dim + config.audio_in_channels
    patches = rows * C + 2 * C + config.output_heads * rows * (C + 1)
    time_hidden = config.time_embed_hidden_dim
    time = time_hidden * (config.freq_dim + 1) + config.time_embed_dim * (time_hidden + 1)
    rest = patches + C * (config.text_dim + 1) + time * (config.adaln != "curve") + 2 * C + 2 * C * (adaln_in + 1)
    return config.num_layers * block + config.num_refiner_layers * refiner_block + rest


def resident_parameters(config: DiTConfig) -> int:
    """Without the AdaLN of the main blocks, which is read for its tables and not kept."""
    adaln = BLOCK_ROWS * config.hidden_size * (_adaln_inputs(config) + 1)
    return num_parameters(config) - config.num_layers * adaln


def _adaln_inputs(config: DiTConfig) -> int:
    return config.adaln_rank or config.time_embed_dim
