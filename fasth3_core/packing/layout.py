"""The packed sequence: which rows it has, where they sit, and which time and modality modulate them.

    [ text | conditions | target audio | target video ]

Text, conditions and audio are the prefix; the target video is always last. Keyframes share the target's spatial grid
and clock; references run on a clock of their own before the target's, which then starts where theirs ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..config import PATCH
from ..errors import ContractError, GeometryError
from .geometry import LATENT_PIXELS
from .positions import (
    audio_positions,
    frames_in,
    keyframe_time,
    reference_span,
    text_positions,
    video_positions,
)

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = 0, 1, 2
"""Modality of a row; picks its AdaLN parameters. Vision placeholders inside the text carry VIDEO_TAG."""

REFERENCE_KINDS = ("image", "audio", "video", "video_audio")


@dataclass(frozen=True)
class Keyframe:
    """A clean latent anchored in the target: an image, or a short clip, and the sound that starts with it."""

    frame: int
    """Pixel frame of the target where it starts."""
    latent: torch.Tensor | None
    """[1, C, t, H, W] with the target's H and W, or None when only sound is anchored."""
    audio_latent: torch.Tensor | None = None
    """[1, 32, 2, a]"""


@dataclass(frozen=True)
class Reference:
    """An ordered reference with its own spatial grid."""

    kind: str
    latent: torch.Tensor | None = None
    audio_latent: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in REFERENCE_KINDS:
            raise ContractError(f"reference kind {self.kind!r}: known are {list(REFERENCE_KINDS)}.")
        if (self.latent is None) != (self.kind == "audio"):
            raise ContractError(f"a reference of kind {self.kind!r} {'has' if self.latent is not None else 'lacks'} "
                                "a picture latent.")
        if (self.audio_latent is None) == (self.kind in ("audio", "video_audio")):
            raise ContractError(f"a reference of kind {self.kind!r} {'lacks' if self.audio_latent is None else 'has'} "
                                "a sound latent.")

    @property
    def num_tokens(self) -> int:
        """Rows of the packed sequence that it takes."""
        t, h, w = (0, 0, 0) if self.latent is None else self.latent.shape[2:]
        num_audio = 0 if self.audio_latent is None else self.audio_latent.shape[-1]
        return t * (h // PATCH) * (w // PATCH) + 2 * num_audio


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) that share a modality and a clock."""

    start: int
    stop: int
    tag: int
    clock: str
    """"video" and "audio": the targets' times. "condition": max(video time, condition time). "clean": always 1."""


@dataclass(frozen=True)
class PackedLayout:
    """Structure of one packed sequence; everything here is known before sampling starts."""

    segments: tuple[Segment, ...]
    """Cover [0, S) in order; the last two are the target audio and the target video."""
    prefix: tuple[int, int, int]
    """Rows of text, of visual conditions, of sound: the segments that sparse attention tiles separately."""
    grid: tuple[int, int, int]
    """Target video tokens: (T, H/2, W/2)."""
    position_ids: torch.Tensor
    """[S, 3] float64 (t, h, w)."""
    token_tags: torch.Tensor
    """[S] int64."""

    @property
    def num_tokens(self) -> int:
        return self.position_ids.shape[0]

    @property
    def video(self) -> Segment:
        return self.segments[-1]

    @property
    def audio(self) -> Segment:
        return self.segments[-2]

    @property
    def prefix_runs(self) -> tuple[int, ...]:
        """Like `prefix`, but with every condition on its own and in packed order: how head-bank students tile it."""
        return (self.prefix[0], *(s.stop - s.start for s in (*self.conditions, self.audio)))

    @property
    def conditions(self) -> tuple[Segment, ...]:
        """Condition segments in packed order, visual and sound."""
        return tuple(s for s in self.segments[:-2] if s.clock in ("condition", "clean"))


def build_layout(
    text_tags: torch.Tensor,
    latent_frames: int,
    latent_height: int,
    latent_width: int,
    num_audio: int,
    keyframes: Sequence[Keyframe] = (),
    references: Sequence[Reference] = (),
) -> PackedLayout:
    """Lay out one request.

    Args:
        text_tags: [L] int64, 1 for text and 0 for vision placeholders.
        latent_frames, latent_height, latent_width: target video latent.
        num_audio: target audio latents per channel.

    Raises:
        ContractError: a tag is neither 0 nor 1.
        GeometryError: a keyframe that is not on the target's grid or does not fit its frames.
    """
    if bad := sorted(set(text_tags.tolist()) - {VIDEO_TAG, TEXT_TAG}):
        raise ContractError(f"text token tags must be 1 (text) or 0 (vision placeholder), got {bad}.")
    text_tags = text_tags.to(torch.int64)
    H, W = latent_height, latent_width
    L = text_tags.numel()
    rows = _Rows()
    rows.add_text(text_tags)

    origin = float(L)
    for ref in references:
        origin += _span(ref)
    for keyframe in keyframes:
        _check_keyframe(keyframe, latent_frames, H, W)
        at = keyframe_time(origin, keyframe.frame, latent_frames)
        if keyframe.latent is not None:
            rows.add_video(video_positions(keyframe.latent.shape[2], H, W, at), "condition")
        if keyframe.audio_latent is not None:
            rows.add_audio(audio_positions(keyframe.audio_latent.shape[-1], H, W, at), "clean")

    cursor = float(L)
    for ref in references:
        h, w = ref.latent.shape[-2:] if ref.latent is not None else (H, W)
        if h % PATCH or w % PATCH:
            raise GeometryError(f"a reference of {h} x {w} latents: both must be even (multiples of 32 pixels).")
        if ref.audio_latent is not None:
            rows.add_audio(audio_positions(ref.audio_latent.shape[-1], h, w, cursor), "clean")
        if ref.latent is not None:
            rows.add_video(video_positions(ref.latent.shape[2], h, w, cursor), "condition")
        cursor += _span(ref)

    rows.add_audio(audio_positions(num_audio, H, W, origin), "audio")
    rows.add_video(video_positions(latent_frames, H, W, origin), "video")

    num_visual = sum(s.stop - s.start for s in rows.segments if s.clock == "condition")
    num_sound = sum(s.stop - s.start for s in rows.segments if s.tag == AUDIO_TAG)
    return PackedLayout(
        segments=tuple(rows.segments),
        prefix=(L, num_visual, num_sound),
        grid=(latent_frames, H // PATCH, W // PATCH),
        position_ids=torch.cat(rows.positions),
        token_tags=torch.cat(rows.tags),
    )


def _span(ref: Reference) -> float:
    if ref.kind == "image":
        return 1.0
    num_audio = 0 if ref.audio_latent is None else ref.audio_latent.shape[-1]
    return float(num_audio) if ref.latent is None else reference_span(ref.latent.shape[2], num_audio)


def _check_keyframe(keyframe: Keyframe, latent_frames: int, H: int, W: int) -> None:
    frames = frames_in(latent_frames)
    if not 0 <= keyframe.frame < frames:
        raise GeometryError(f"a keyframe at frame {keyframe.frame}: the video has frames 0 to {frames - 1}.")
    if keyframe.latent is None:
        return
    h, w = keyframe.latent.shape[-2:]
    if (h, w) != (H, W):
        raise GeometryError(
            f"a keyframe of {w * LATENT_PIXELS} x {h * LATENT_PIXELS} pixels for a video of {W * LATENT_PIXELS} x "
            f"{H * LATENT_PIXELS}: encode it at that size."
        )
    length = frames_in(keyframe.latent.shape[2])
    if keyframe.frame + length > frames:
        raise GeometryError(
            f"a {length}-frame keyframe clip at frame {keyframe.frame} does not fit in {frames} frames."
        )


class _Rows:
    """Collects segments in packed order."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.positions: list[torch.Tensor] = []
        self.tags: list[torch.Tensor] = []

    def add_text(self, tags: torch.Tensor) -> None:
        # one segment per run of equal tags: vision placeholders take the video modulation
        values = tags.tolist()
        cuts = [0, *(i for i in range(1, len(values)) if values[i] != values[i - 1]), len(values)]
        for start, stop in pairwise(cuts):
            if stop > start:
                self.segments.append(Segment(start, stop, values[start], "video"))
        self.positions.append(text_positions(len(values)))
        self.tags.append(tags.to(torch.int64).cpu())

    def add_video(self, positions: torch.Tensor, clock: str) -> None:
        self._add(positions, VIDEO_TAG, clock)

    def add_audio(self, positions: torch.Tensor, clock: str) -> None:
        self._add(positions, AUDIO_TAG, clock)

    def _add(self, positions: torch.Tensor, tag: int, clock: str) -> None:
        start = self.segments[-1].stop if self.segments else 0
        self.segments.append(Segment(start, start + positions.shape[0], tag, clock))
        self.positions.append(positions)
        self.tags.append(torch.full((positions.shape[0],), tag, dtype=torch.int64, device="cpu"))
