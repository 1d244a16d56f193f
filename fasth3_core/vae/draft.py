"""A small convolutional decoder (taeh3) instead of the ViT: a whole clip in seconds, and a draft of the picture.

Causal in time: the input of every memory block at the frame before is all that it keeps, so that a clip is decoded
latent by latent at a fixed memory. Takes normalised latents as they are sampled; no tiles. N frames, C channels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ...kernels.precision import exact_fp32
from ..errors import ConfigError, FastH3Error, GeometryError
from . import chunks, tensors
from .collect import Decodes
from .run import Progress, nothing

DRAFT = "draft decoder (taeh3): quick, and not the released picture"
GROUP = chunks.CLIP_LATENTS * chunks.FRAMES_PER_LATENT
"""Decoded frames of 5 latents, of which the first 3 are dropped: the first latent stands for one frame."""
SHUFFLE = 2

# what stands at decoder.N: a convolution, three memory blocks, or growth in time by the given factor; all else has no
# weights: 0 is 3 tanh(x / 3), 2 and 21 are relu, 6, 12 and 18 double both sides
_CONVS = (1, 8, 14, 20, 22)
_MEMORY = ((3, 4, 5), (9, 10, 11), (15, 16, 17))
_GROWTH = {7: 1, 13: 2, 19: 2}
_WIDE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Conv:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x_NCHW, self.weight, self.bias, padding=self.weight.shape[-1] // 2)


@dataclass(frozen=True)
class DraftVAE(Decodes):
    """Weights on one device, with the decoding half of VideoVAE's methods. Immutable: `to` makes another."""

    convs: tuple[tuple[int, Conv], ...]
    memory: tuple[tuple[int, tuple[Conv, Conv, Conv]], ...]
    growth: tuple[tuple[int, Conv], ...]
    latent_channels: int
    device: torch.device
    encoder: None = field(default=None, init=False)

    @classmethod
    def from_tensors(
        cls, tensors_by_name: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> "DraftVAE":
        """Widths come from the shapes; the encoder of the file is not read. Raises CheckpointError, ConfigError."""
        if dtype not in _WIDE:
            raise ConfigError("dtype", dtype, f"one of {list(_WIDE)}", "Use float16 on a GPU, float32 anywhere.")
        device = torch.device(device)
        reader = tensors.Reader(tensors_by_name, "draft decoder", device)

        def conv(name: str, inp: int | None, out: int | None, kernel: int) -> Conv:
            weight = reader.take(f"{name}.weight", (out, inp, kernel, kernel), dtype)
            has_bias = f"{name}.bias" in tensors_by_name
            return Conv(weight, reader.take(f"{name}.bias", (len(weight),), dtype) if has_bias else None)

        convs, memory, growth = {1: conv("decoder.1", None, None, 3)}, {}, {}
        channels, width = convs[1].weight.shape[1], len(convs[1].weight)
        for blocks, grow, after in zip(_MEMORY, _GROWTH, _CONVS[1:], strict=False):
            for index in blocks:
                name = f"decoder.{index}.conv"
                memory[index] = tuple(
                    conv(f"{name}.{part}", inp, width, 3) for part, inp in ((0, 2 * width), (2, width), (4, width))
                )
            growth[grow] = conv(f"decoder.{grow}.conv", width, width * _GROWTH[grow], 1)
            convs[after] = conv(f"decoder.{after}", width, None, 3)
            width = len(convs[after].weight)
        convs[22] = conv("decoder.22", width, 3 * SHUFFLE**2, 3)
        reader.refuse_leftovers("decoder.")
        return cls(tuple(convs.items()), tuple(memory.items()), tuple(growth.items()), channels, device)

    @property
    def dtype(self) -> torch.dtype:
        return self.convs[0][1].weight.dtype

    @property
    def nbytes(self) -> int:
        return tensors.nbytes(self)

    def to(self, device: torch.device | str) -> "DraftVAE":
        """The same decoder with its weights on `device`."""
        device = torch.device(device)
        parts = (tensors.moved(part, device) for part in (self.convs, self.memory, self.growth))
        return DraftVAE(*parts, self.latent_channels, device)

    def decode_chunks(
        self,
        latent: torch.Tensor,
        *,
        tile_batch: int = 0,
        on_chunk: Progress | None = None,
        check_interrupt: Callable[[], None] = nothing,
    ) -> Iterator[torch.Tensor]:
        """Yield finished frames [1, 3, n, H, W] fp32 on the decoder's device, those of 5 latents at a time.

        Args:
            latent: normalised [1, 24, T, h, w], any device, T >= 1.
            tile_batch: of no effect; VideoVAE's.
            on_chunk: called as (latents done, latents in all).
            check_interrupt: called before every latent; what it raises passes through.

        Raises GeometryError for a latent of another form; after the last chunk, FastH3Error if it was not finite.
        """
        if latent.ndim != 5 or latent.shape[:2] != (1, self.latent_channels) or not latent.shape[2]:
            expected = f"[1, {self.latent_channels}, T, h, w]"
            raise GeometryError(f"a video latent of shape {list(latent.shape)}: expected {expected}")
        return self._chunks(latent.detach(), on_chunk or nothing, check_interrupt)

    def _chunks(
        self, latent: torch.Tensor, on_chunk: Progress, check_interrupt: Callable[[], None]
    ) -> Iterator[torch.Tensor]:
        total, past, finite = latent.shape[2], {}, []
        for first in range(0, total, chunks.CLIP_LATENTS):
            made = []
            for index in range(first, min(first + chunks.CLIP_LATENTS, total)):
                check_interrupt()
                with exact_fp32(self.device):
                    made.append(self._step(latent[:, :, index].to(self.device, self.dtype), past))
                on_chunk(index + 1, total)
            frames = torch.cat(made)[chunks.FRAME_DROP :]
            finite.append(frames.sum(dtype=torch.float32))
            yield frames.float().clamp_(0, 1).movedim(1, 0)[None].contiguous()
        if not bool(torch.stack(finite).isfinite().all()):
            raise FastH3Error(f"the draft decoder made NaN or infinity in {self.dtype}: file or latent is damaged.")

    def _step(self, x_NCHW: torch.Tensor, past: dict[int, torch.Tensor]) -> torch.Tensor:
        """One latent [1, 24, h, w] to frames [4, 3, 16h, 16w]; `past` holds each memory block's last input frame."""
        convs, memory, growth = dict(self.convs), dict(self.memory), dict(self.growth)
        x = F.relu(convs[1](3 * torch.tanh(x_NCHW / 3)))
        for blocks, grow, after in zip(_MEMORY, _GROWTH, _CONVS[1:], strict=False):
            for index in blocks:
                x = self._remember(x, index, memory[index], past)
            x = growth[grow](F.interpolate(x, scale_factor=2, mode="nearest"))
            x = convs[after](x.reshape(-1, x.shape[1] // _GROWTH[grow], *x.shape[2:]))
        return F.pixel_shuffle(convs[22](F.relu(x)), SHUFFLE)

    @staticmethod
    def _remember(
        x: torch.Tensor, index: int, convs: tuple[Conv, Conv, Conv], past: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Each frame beside the one before it, through three convolutions, added to the frame."""
        before = torch.cat([past.get(index, torch.zeros_like(x[:1])), x[:-1]])
        past[index] = x[-1:]
        hidden = torch.cat([x, before], dim=1)
        for conv in convs[:2]:
            hidden = F.relu(conv(hidden), inplace=True)
        return F.relu(convs[2](hidden).add_(x), inplace=True)


def is_draft(names: Iterable[str]) -> bool:
    """Whether a file of these names holds such a decoder."""
    return {"decoder.1.weight", "decoder.3.conv.0.weight", "decoder.22.weight"} <= set(names)
