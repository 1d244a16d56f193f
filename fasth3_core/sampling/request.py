"""One request: what to sample, checked before any weight is touched."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import PATCH, DiTConfig
from ..errors import ContractError, GeometryError
from ..model.handle import H3Model
from ..packing.geometry import FPS, LATENT_PIXELS, TRAINED_FRAMES, audio_latents, frames_of_latents
from ..packing.layout import Keyframe, PackedLayout, Reference, build_layout
from .noise import Condition


@dataclass(frozen=True, kw_only=True)
class Request:
    text_states: torch.Tensor
    """[1, L, text_dim] prompt states of the text encoder's layer 50."""
    token_tags: torch.Tensor | None = None
    """[L] int64, 1 text and 0 vision placeholder; None means all text."""
    latent_frames: int
    latent_height: int
    latent_width: int
    audio_latents: int
    """Per stereo channel."""
    seed: int = 0
    keyframes: Sequence[Keyframe] = ()
    references: Sequence[Reference] = ()
    condition_noise: str = "fastvideo"
    """See `noise.draw`."""
    noise: tuple[torch.Tensor, torch.Tensor] | None = None
    """Given starting noise (video [1, C, T, H, W], audio [1, C, 2, A]) instead of the seed's."""

    @property
    def frames(self) -> int:
        return frames_of_latents(self.latent_frames)

    @property
    def tags(self) -> torch.Tensor:
        if self.token_tags is None:
            return torch.ones(self.text_states.shape[1], dtype=torch.int64, device="cpu")
        return self.token_tags.reshape(-1)

    @property
    def task(self) -> str:
        return "ref2va" if self.references else "fl2va" if self.keyframes else "t2va"

    def conditions(self) -> list[Condition]:
        """Clean condition latents in packed order: keyframes, then references with their sound first."""
        out = []
        for keyframe in self.keyframes:
            out += [(keyframe.latent, True), (keyframe.audio_latent, False)]
        for reference in self.references:
            out += [(reference.audio_latent, False), (reference.latent, True)]
        return [Condition(latent, visual) for latent, visual in out if latent is not None]

    def layout(self) -> PackedLayout:
        return build_layout(
            self.tags, self.latent_frames, self.latent_height, self.latent_width, self.audio_latents,
            self.keyframes, self.references,
        )

    def check(self, model: H3Model) -> list[str]:
        """Raise on what the model cannot take; return warnings for what it can but was not trained on."""
        config = model.config
        states = self.text_states
        if states.ndim != 3 or states.shape[0] != 1:
            raise ContractError(
                f"prompt states of shape {list(states.shape)}: expected [1, L, {config.text_dim}]. Batch is 1 only: "
                "queue the other prompts or seeds one after another."
            )
        if states.shape[1] == 0:
            raise ContractError("the prompt has no tokens: write at least one word.")
        if states.shape[2] != config.text_dim:
            raise ContractError(
                f"prompt states are {states.shape[2]} wide, the model reads {config.text_dim}: they come from another "
                "text encoder. Use Qwen3-VL-32B for MiniMax-H3 (CLIP loader type 'minimax')."
            )
        if self.tags.numel() != states.shape[1]:
            raise ContractError(f"{self.tags.numel()} token tags for {states.shape[1]} prompt tokens.")
        sides = self.latent_height, self.latent_width
        if min(sides) < PATCH or any(side % PATCH for side in sides):
            raise GeometryError(
                f"a latent for {self.latent_width * LATENT_PIXELS} x {self.latent_height * LATENT_PIXELS} pixels: "
                "width and height must be multiples of 32. FastH3 Empty Latent makes legal ones."
            )
        frames = self.frames
        expected = audio_latents(frames)
        if self.audio_latents != expected:
            raise GeometryError(
                f"{self.audio_latents} audio latents for {frames} frames: {frames / FPS:.3f} s of sound has {expected}."
            )
        _check_values("prompt states", states)
        self._check_latents(config)
        if model.contract.fine_steps and any(ref.kind in ("video", "video_audio") for ref in self.references):
            raise ContractError(
                f"contract '{model.contract.name}' tiles every reference video as a region of its own, which is not "
                "supported. Use pictures and sound as references, or another student."
            )
        shortest, longest = TRAINED_FRAMES
        if shortest <= frames <= longest:
            return []
        return [f"{frames} frames: the model was trained on {shortest} to {longest}; quality outside is unknown."]

    def _check_latents(self, config: DiTConfig) -> None:
        video, audio = config.in_channels, config.audio_in_channels
        for condition in self.conditions():
            what = "a keyframe or reference latent" if condition.visual else "a keyframe's or reference's sound latent"
            form = (1, video, "t", "h", "w") if condition.visual else (1, audio, 2, "a")
            _check_latent(what, condition.latent, form)
        if self.noise is not None:
            size = self.latent_frames, self.latent_height, self.latent_width
            _check_latent("starting video noise", self.noise[0], (1, video, *size))
            _check_latent("starting audio noise", self.noise[1], (1, audio, 2, self.audio_latents))

    def departures(self) -> list[str]:
        """What a student was not distilled for, and what replaces the seed."""
        said = []
        visual = any(condition.visual for condition in self.conditions())
        if visual and self.condition_noise != "fastvideo":
            said.append(f"condition noise '{self.condition_noise}' instead of 'fastvideo'")
        if visual and bool(self.tags.all()):
            said.append("the text encoder has not seen the pictures")
        return said + (["starting noise given instead of drawn from the seed"] if self.noise is not None else [])


def _check_latent(what: str, latent: torch.Tensor, form: tuple[int | str, ...]) -> None:
    """Letters in `form` stand for any size from 1."""
    sizes = zip(latent.shape, form, strict=False)
    if latent.ndim != len(form) or not all(n == want if isinstance(want, int) else n for n, want in sizes):
        raise ContractError(
            f"{what} of shape {list(latent.shape)}: expected [{', '.join(map(str, form))}]."
        )
    _check_values(what, latent)


def _check_values(what: str, values: torch.Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ContractError(f"{what}: there is NaN or infinity in it. Encode it again, in bf16 or fp32.")
