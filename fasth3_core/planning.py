"""What a request will need, computed from headers and sizes before anything is loaded."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from .config import PATCH, DiTConfig, VSAConfig
from .errors import GeometryError
from .model.blocks import PASS_ROWS
from .packing.geometry import (
    FPS,
    LATENT_PIXELS,
    audio_latents,
    check_size,
    latent_frames,
)
from .planning_memory import RunBytes, Tiles, run_bytes
from .planning_sizes import num_block_parameters
from .vsa.tiles import PART_SIZE, tile_plan
from .weights.placement import GIB, RESIDENT, Placement, Sizes, describe

MAX_TOKENS = 1_000_000
"""Nine times the longest clip of the training range at 768 x 1344."""

_SPEEDS = (600, 100, 25)
"""TFLOP/s that a forward reaches: an H200 as measured in bf16, and what lets a reader place a smaller card."""

_DECODE_WEIGHTS, _DECODE_TILES, _DECODE_PIXEL = 5_900_000_000, 1_200_000_000, 576
"""Bytes on the device while the released VAEs decode: fp16 weights, four tiles at once, a pixel of the canvas."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A plain request and the model that it is for."""

    width: int
    height: int
    """Pixels, multiples of 32."""
    frames: int
    """17k + 5."""
    text_tokens: int
    forwards: int
    config: DiTConfig
    vsa: VSAConfig | None
    """Resolved settings, or None for dense attention."""
    sizes: Sizes
    """Of the weights on the device."""
    element_size: int
    """Bytes per activation element (2 for bf16)."""
    condition_tokens: int = 0
    """Of keyframes and references."""
    eager: bool = False
    """Whether the sparse op runs with torch alone."""
    dequantised: int = 0
    """Bytes that a value of a quantised weight takes while it is widened to be multiplied with; 0 without any."""
    fp8: bool = False
    """Whether the products of the blocks take both sides in fp8."""
    pass_rows: int = PASS_ROWS
    """Tokens that go through the products of a block together."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    width: int
    height: int
    frames: int
    text_tokens: int
    condition_tokens: int
    audio_tokens: int
    video_tokens: int
    tokens: int
    """The packed sequence."""
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
    pass_rows: int
    """Tokens that go through the products of a block together."""
    placement: str
    weight_bytes: int
    """On the device while the forwards run."""
    visiting_bytes: int
    """Of weights that are there only before."""
    host_weight_bytes: int
    """Of what visits the device, in host memory or a mapped file."""
    run: RunBytes
    """On the device during a forward, on top of the weights."""
    decode_bytes: int
    """On the device while the released VAEs decode; the transformer can be away."""
    decode_host_bytes: int
    """Of the decoded frames in fp32."""
    teraflop: float
    """Of one forward."""
    streamed_bytes: int
    """From the host to the device in one forward."""

    @property
    def peak_bytes(self) -> int:
        """Highest use of the device while sampling, as torch counts it."""
        return self.weight_bytes + max(self.run.peak, self.visiting_bytes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"run": self.run.to_dict(), "peak_bytes": self.peak_bytes}

    def to_text(self) -> str:
        condition = f" + {self.condition_tokens:,} conditions" if self.condition_tokens else ""
        lines = [
            f"{self.width}x{self.height}, {self.frames} frames ({self.frames / FPS:.2f} s): {self.tokens:,} tokens = "
            f"{self.text_tokens:,} text{condition} + {self.audio_tokens:,} audio + {self.video_tokens:,} video",
        ]
        if self.tile_size is None:
            lines.append(f"dense attention in all {self.forwards} forwards")
        else:
            lines.append(
                f"tiles of {self.tile_size}: {self.prefix_tiles} prefix + {self.video_tiles} video, "
                f"{self.tile_fill:.0%} filled; each query tile keeps {self.kept_tiles} of {self.video_tiles}; "
                f"{self.sparse_steps} of {self.forwards} forwards sparse"
            )
        passes = f"; {self.pass_rows:,} tokens a pass" if self.pass_rows < PASS_ROWS else ""
        lines += [
            f"sampling: device {self.peak_bytes / GIB:.2f} GiB = weights {self.weight_bytes / GIB:.2f} + activations "
            f"{self.run.peak / GIB:.2f}; {self.placement}" + passes,
            f"decoding: device about {self.decode_bytes / GIB:.1f} GiB, frames {self.decode_host_bytes / GIB:.2f} GiB "
            "of host memory",
        ]
        if self.host_weight_bytes:
            lines.append(
                f"streaming: {self.host_weight_bytes / GIB:.2f} GiB of host memory, {self.streamed_bytes / GIB:.2f} "
                f"GiB a forward = {self.streamed_bytes / 25e9:.1f} s at 25 GB/s, hidden behind a forward that is longer"
            )
        total = self.teraflop * self.forwards
        speeds = ", ".join(f"{_duration(total / speed)} at {speed}" for speed in _SPEEDS)
        lines.append(f"time: {total / 1e3:.1f} PFLOP in {self.forwards} forwards: {speeds} TFLOP/s")
        return "\n".join(lines)


def plan(wanted: Wanted, placement: Placement = RESIDENT) -> Plan:
    """Count tokens, tiles, bytes and operations of a request.

    Raises:
        GeometryError: sizes that the model does not take; the message names the nearest legal ones.
    """
    grid, audio, tokens = _tokens(wanted)
    video, config, vsa = math.prod(grid), wanted.config, wanted.vsa
    tiles, fill, sparse_steps, dense = None, 1.0, 0, True
    if vsa is not None:
        laid = tile_plan((wanted.text_tokens, wanted.condition_tokens, audio), grid, vsa.tile_size)
        kept = vsa.kept_tiles(laid.num_video_tiles, step=vsa.dense_first_steps)
        tiles = Tiles(
            prefix=laid.num_prefix_tiles, video=laid.num_video_tiles, kept=kept, parts=vsa.tile_size // PART_SIZE,
        )
        fill = video / (tiles.video * vsa.tile_size)
        dense = kept == tiles.video or vsa.dense_first_steps > 0 or bool(vsa.dense_layers)
        if kept < tiles.video:
            sparse_steps = wanted.forwards - min(wanted.forwards, vsa.dense_first_steps)
    run = run_bytes(
        tokens=tokens, text_tokens=wanted.text_tokens, video_tokens=video, conditions=wanted.condition_tokens > 0,
        forwards=wanted.forwards, config=config, element=wanted.element_size, tiles=tiles, gated=vsa is not None,
        dense=dense, eager=wanted.eager, dequantised=wanted.dequantised, fp8=wanted.fp8, pass_rows=wanted.pass_rows,
    )
    streamed = len(placement.streamed) > placement.slots
    return Plan(
        width=wanted.width,
        height=wanted.height,
        frames=wanted.frames,
        text_tokens=wanted.text_tokens,
        condition_tokens=wanted.condition_tokens,
        audio_tokens=audio,
        video_tokens=video,
        tokens=tokens,
        forwards=wanted.forwards,
        tile_size=None if vsa is None else vsa.tile_size,
        prefix_tiles=tiles.prefix if tiles else 0,
        video_tiles=tiles.video if tiles else 0,
        kept_tiles=tiles.kept if tiles else 0,
        tile_fill=fill,
        sparse_steps=sparse_steps,
        pass_rows=wanted.pass_rows,
        placement=describe(placement, wanted.sizes),
        weight_bytes=wanted.sizes.device(placement),
        visiting_bytes=wanted.sizes.visiting(placement),
        host_weight_bytes=wanted.sizes.host(placement),
        run=run,
        decode_bytes=_DECODE_WEIGHTS + _DECODE_TILES + wanted.width * wanted.height * _DECODE_PIXEL,
        decode_host_bytes=wanted.frames * wanted.width * wanted.height * 3 * 4,
        teraflop=_teraflop(wanted, tokens, video, tiles),
        streamed_bytes=sum(wanted.sizes.blocks[i] for i in placement.streamed) if streamed else 0,
    )


def _tokens(wanted: Wanted) -> tuple[tuple[int, int, int], int, int]:
    """Video grid, audio rows and all tokens; refuses what nobody can mean before anything is built for it."""
    check_size(wanted.width, wanted.height)
    if wanted.frames > MAX_TOKENS:
        raise GeometryError(f"more than {MAX_TOKENS:,} frames: the model was trained on up to 362, which is 15 s.")
    if wanted.text_tokens < 1:
        raise GeometryError(f"{wanted.text_tokens} prompt tokens: expected at least 1. A long prompt has 300.")
    grid = (
        latent_frames(wanted.frames), wanted.height // LATENT_PIXELS // PATCH, wanted.width // LATENT_PIXELS // PATCH,
    )
    audio = 2 * audio_latents(wanted.frames)
    tokens = wanted.text_tokens + wanted.condition_tokens + audio + math.prod(grid)
    if tokens > MAX_TOKENS:
        raise GeometryError(
            f"{wanted.width}x{wanted.height}, {wanted.frames} frames and {wanted.text_tokens} prompt tokens make "
            f"{tokens:,} tokens: at most {MAX_TOKENS:,}. The model was trained on up to 768 x 1344 and 362 frames, "
            "109,362 tokens."
        )
    return grid, audio, tokens


def _teraflop(wanted: Wanted, tokens: int, video: int, tiles: Tiles | None) -> float:
    """Of one forward: two operations for a weight and token, four for a pair of tokens and channel of attention."""
    config = wanted.config
    linears = 2 * tokens * config.num_layers * num_block_parameters(config)
    pairs = tokens * tokens
    if tiles is not None and tiles.kept < tiles.video:
        kept_keys = tokens - video + video * tiles.kept / tiles.video
        pairs = (tokens - video) * tokens + video * kept_keys
    return (linears + 4 * pairs * config.inner_dim * config.num_layers) / 1e12


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else (
        f"{seconds / 3600:.1f} h"
    )
