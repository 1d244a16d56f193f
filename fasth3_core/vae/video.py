"""The video VAE: latents [1, 24, T, h, w] <-> pixels [1, 3, F, 16h, 16w], tile by tile and clip by clip.

Latents are fp32 and normalised on the way in to decode(), raw on the way out of encode(); pixels are fp32 in [0, 1].
Memory is bounded by one clip, whatever the length.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ...kernels.precision import exact_fp32
from ..errors import CheckpointError, ConfigError, GeometryError
from . import chunks, latents, tensors
from .collect import Decodes
from .decoding import TileClips, WholeFrames, decode_clips
from .encoding import encode_moments
from .run import Progress, Run, nothing
from .tiling import STEP, axis_tiles
from .video_decoder import ViTDecoder, read_decoder
from .video_encoder import VideoEncoder, read_encoder
from .windows import WindowOptions, spans

FP8 = torch.float8_e4m3fn
NO_ENCODER = "this video VAE file holds a decoder only. To encode, load one with `encoder.*` tensors."
DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)


@dataclass(frozen=True)
class VideoVAE(Decodes):
    """Weights on one device; latents_mean and latents_std are [24]. Immutable: `to` makes another."""

    decoder: ViTDecoder | None
    """None where only the encoder was read."""
    encoder: VideoEncoder | None
    latents_mean: torch.Tensor
    latents_std: torch.Tensor
    device: torch.device
    windows: WindowOptions | None = None
    """How a decoder of whole frames was trained; None for tiles, the released plan."""

    @classmethod
    def from_tensors(
        cls,
        tensors_by_name: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        head_dim: int = 64,
        only: str = "",
        windows: WindowOptions | None = None,
    ) -> "VideoVAE":
        """Build from diffusers names; every size comes from the shapes.

        Args:
            tensors_by_name: float tensors, or QuantizedWeight for layers of decoder blocks, which stay int8; read once
                each, so the mapping may load on access.
            dtype: of the decoder's linears and attention. The encoder, the residual, norms and scales stay fp32.
                float8_e4m3fn quantises the blocks' linears by rows, for twice the speed of fp16 where the GPU has it;
                the rest is bf16 then.
            head_dim: of the decoder, which no tensor tells.
            only: "decoder" or "encoder" to read no more than that; "" reads what there is.
            windows: of a decoder of whole frames; None is the released plan, which refuses 24 blocks.

        A file without an encoder decodes; its encode() raises. Raises CheckpointError, ConfigError.
        """
        if dtype not in DTYPES:
            raise ConfigError("dtype", dtype, f"one of {list(DTYPES)}", "Use float16 on a GPU, float32 anywhere.")
        device = torch.device(device)
        reader = tensors.Reader(tensors_by_name, "video VAE", device)
        form, wide = ("fp8", torch.bfloat16) if dtype == FP8 else ("", dtype)
        has_encoder = any(name.startswith("encoder.") for name in tensors_by_name)
        with exact_fp32(device):  # the caller's autocast would recast what is joined
            decoder = None
            if only != "encoder":
                decoder = read_decoder(reader, wide, head_dim, form, windows=windows is not None)
        encoder = read_encoder(reader) if has_encoder and only != "decoder" else None
        if only == "encoder" and encoder is None:
            raise CheckpointError(NO_ENCODER)
        channels = {part.latent_channels for part in (decoder, encoder) if part is not None}
        if len(channels) > 1:
            raise CheckpointError(
                f"video VAE: the encoder makes {encoder.latent_channels} channels, "
                f"the decoder takes {decoder.latent_channels}"
            )
        mean, std = latents.statistics(reader, latents.VIDEO_MEAN, latents.VIDEO_STD, channels.pop())
        return cls(decoder, encoder, mean, std, device, windows)

    @property
    def dtype(self) -> torch.dtype:
        """Of the decoder; the encoder is fp32."""
        return torch.float32 if self.decoder is None else self.decoder.dtype

    @property
    def nbytes(self) -> int:
        return tensors.nbytes(self)

    def to(self, device: torch.device | str) -> "VideoVAE":
        """The same VAE with its weights on `device`; this one keeps its own."""
        return tensors.moved(self, torch.device(device))

    def normalise(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw latents [B, 24, ...] to those that the transformer samples."""
        return latents.normalise(raw, self.latents_mean, self.latents_std)

    def denormalise(self, latent: torch.Tensor) -> torch.Tensor:
        """Inverse of `normalise`."""
        return latents.denormalise(latent, self.latents_mean, self.latents_std)

    def decode_chunks(
        self,
        latent: torch.Tensor,
        *,
        tile_batch: int = 0,
        on_chunk: Progress | None = None,
        check_interrupt: Callable[[], None] = nothing,
    ) -> Iterator[torch.Tensor]:
        """Yield finished frames [1, 3, n, H, W] fp32 on the VAE's device, in order, as soon as they are final.

        Args:
            latent: normalised [1, 24, T, h, w], any device, T >= 1.
            tile_batch: most tiles of a decoder call; 0 = 7 on CUDA, fewer if memory runs out, and 1 elsewhere. The CPU
                always runs tiles one by one, so that the pixels do not depend on it there; on a GPU they do by at most
                1/255.
            on_chunk: called as (tiles done, tiles in all) after every decoder call.
            check_interrupt: called before every decoder call; what it raises passes through.

        Raises GeometryError for a latent of another form, ConfigError for a negative tile_batch; after the last chunk,
        FastH3Error if a clip was not finite.
        """
        if self.decoder is None:
            raise CheckpointError("of this video VAE only the encoder was read: it cannot decode")
        channels = self.decoder.latent_channels
        if latent.ndim != 5 or latent.shape[:2] != (1, channels):
            raise GeometryError(f"a video latent of shape {list(latent.shape)}: expected [1, {channels}, T, h, w]")
        if tile_batch < 0:
            raise ConfigError("tile_batch", tile_batch, "0 or more", "Use 0 to let the device decide.")
        plan = chunks.decode_plan(latent.shape[2])
        if self.windows is not None:
            return self._whole_frames(latent, plan, self.windows, on_chunk or nothing, check_interrupt)
        rows, columns = (axis_tiles(side * STEP) for side in latent.shape[3:])
        total = plan.clips * len(rows.starts) * len(columns.starts)
        run = Run(tile_batch, self.device, on_chunk or nothing, check_interrupt, total)
        make = TileClips(self.decoder, rows, columns, self.device, run)
        return decode_clips(self._raw(latent), plan, make, self.dtype)

    def _raw(self, latent: torch.Tensor) -> torch.Tensor:
        """[T, h, w, 24] on the VAE's device."""
        return self.denormalise(latent.detach().to(self.device))[0].permute(1, 2, 3, 0).contiguous()

    def _whole_frames(
        self,
        latent: torch.Tensor,
        plan: chunks.DecodePlan,
        options: WindowOptions,
        on_chunk: Progress,
        check_interrupt: Callable[[], None],
    ) -> Iterator[torch.Tensor]:
        """Chunks of a decoder by windows: the released clips, or blocks of 5 latents by themselves."""
        blocks = list(spans(plan.latents, options.last))
        run = Run(1, self.device, on_chunk, check_interrupt, plan.clips if options.context == "clips" else len(blocks))
        whole = WholeFrames(self.decoder, options, run)
        if options.context == "clips":
            return decode_clips(self._raw(latent), plan, whole.clip, self.dtype)
        return whole.blocks(self._raw(latent), blocks)

    def encode(
        self,
        pixels: torch.Tensor,
        *,
        on_chunk: Progress | None = None,
        check_interrupt: Callable[[], None] = nothing,
    ) -> torch.Tensor:
        """Raw posterior mean [1, 24, t, H/16, W/16] fp32 of pixels [1, 3, F, H, W], on the pixels' device.

        Pixels are floats in [0, 1] or uint8; 17 frames at a time go to the VAE's device. One frame gives one latent;
        F >= 2 frames are filled up to a multiple of 17 with the last one and give 5 latents per 17, less 3. Raises
        GeometryError, CheckpointError if the file holds no encoder.
        """
        return self.encode_moments(pixels, on_chunk=on_chunk, check_interrupt=check_interrupt)[0]

    def condition_latent(
        self,
        pixels: torch.Tensor,
        seed: int = 42,
        *,
        on_chunk: Progress | None = None,
        check_interrupt: Callable[[], None] = nothing,
    ) -> torch.Tensor:
        """Normalised latent of frames [1, 3, F, H, W], sampled as FastVideo does for conditions: posterior noise from a
        fresh CPU generator, rounded through fp16, then normalised."""
        generator = torch.Generator("cpu").manual_seed(seed)
        moments = self.encode_moments(pixels, on_chunk=on_chunk, check_interrupt=check_interrupt)
        return self.normalise(latents.sample_posterior(*moments, generator).half().float())

    def encode_moments(
        self,
        pixels: torch.Tensor,
        *,
        on_chunk: Progress | None = None,
        check_interrupt: Callable[[], None] = nothing,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log variance (clamped to -30 ... 20), raw, as encode()."""
        if self.encoder is None:
            raise CheckpointError(NO_ENCODER)
        return encode_moments(self.encoder, pixels, self.device, on_chunk, check_interrupt)
