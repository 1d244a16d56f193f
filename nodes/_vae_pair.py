"""FASTH3_VAE: the two VAEs of one request, on disk until they are needed."""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..fasth3_core.checkpoint.audio_names import plan_audio_vae
from ..fasth3_core.checkpoint.component import open_component
from ..fasth3_core.checkpoint.draft_names import plan_draft_decoder
from ..fasth3_core.checkpoint.kinds import Entry
from ..fasth3_core.checkpoint.load import (
    AUDIO_VAE_FOLDERS,
    VIDEO_VAE_FOLDERS,
    load_audio_vae,
    load_video_vae,
    video_vae_dtype,
)
from ..fasth3_core.checkpoint.vae_names import plan_video_vae
from ..fasth3_core.errors import ConfigError
from ..fasth3_core.vae import AudioVAE, VideoVAE
from ..fasth3_core.vae.chunks import CLIP_FRAMES, DECODED_FRAMES, OVERLAP_FRAMES
from ..fasth3_core.vae.draft import DRAFT, DraftVAE, is_draft
from ..fasth3_core.vae.run import AUTO_TILE_BATCH, nothing
from ..fasth3_core.vae.tiling import TILE, axis_tiles
from ..fasth3_core.vae.video import FP8
from ..kernels.fp8_linear import fp8_why_not

log = logging.getLogger("fasth3")

_ENCODER = ("encoder.", "quant_conv.")
_TILE_BYTES = 160 << 20
"""Activations of one 256-pixel tile in the decoder of the release: 1797 tokens, 2048 wide, feed-forward 16384."""
_TILE_PIXEL_BYTES = 3 * DECODED_FRAMES * 2
"""Per pixel of all tiles, which overlap: the 28 frames of a clip in fp16."""
_PIXEL_BYTES = 3 * (2 * OVERLAP_FRAMES * 2 + 2 * CLIP_FRAMES * 4)
"""Per pixel of the canvas: 5 frames that fade into the next clip in fp16 and 17 finished ones in fp32, twice, while one
leaves."""
_SPARE_BYTES = 512 << 20


class _Read:
    """`_loaded` is what `_read` brought to `location`, between materialise() and release()."""

    _loaded: Any = None
    location: torch.device | None = None

    def materialise(
        self,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        check_interrupt: Callable[[], None] | None = None,
    ) -> None:
        if self.location == device:
            return
        self.release()
        self._loaded = self._read(device, check_interrupt or nothing)
        self.location = device
        if progress is not None:
            progress(self.nbytes(device), self.nbytes(device))

    def release(self) -> None:
        self._loaded = self.location = None


class VaePair(_Read):
    """Implements `_host.Resident`. `video` and `audio` exist between materialise() and release().

    Raises CheckpointError for a file that is not the VAE it was chosen as, from its header alone.
    """

    def __init__(self, video_path: Path, audio_path: Path, dtype: str):
        self._paths, self._dtype = (video_path, audio_path), dtype
        component = open_component(video_path, VIDEO_VAE_FOLDERS)
        draft = is_draft(component.tensors)
        video = plan_draft_decoder(component) if draft else plan_video_vae(component)
        self.note = DRAFT if draft else ""
        """What a user has to know about the pictures; "" for a decoder of the released plan."""
        sound = plan_audio_vae(open_component(audio_path, AUDIO_VAE_FOLDERS))
        self._video = [entry for name, entry in video.entries.items() if not name.startswith(_ENCODER)]
        self._audio_values = sum(math.prod(shape) for shape in sound.shapes.values())
        values = sum(math.prod(shape) for name, shape in video.shapes.items() if name.startswith(_ENCODER))
        load = partial(load_video_vae, video_path, "fp32", only="encoder")
        self.encoder = VaeEncoder(load, values) if values else None
        """What encodes pictures, brought to a device for itself; None in a file without."""
        hears = any(name.startswith(_ENCODER) for name in sound.shapes)
        self.sound_encoder = VaeEncoder(partial(load_audio_vae, audio_path), self._audio_values) if hears else None
        """The same for sound. It comes with its decoder: 0.6 GB in all."""

    @property
    def video_path(self) -> Path:
        return self._paths[0]

    @property
    def video(self) -> VideoVAE | DraftVAE:
        return self._loaded[0]

    @property
    def audio(self) -> AudioVAE:
        return self._loaded[1]

    def check(self, device: torch.device) -> None:
        """Raise ConfigError, from no more than names, if the dtype that was asked for cannot be had on a device."""
        video_vae_dtype(self._dtype, device)
        if self.note and self._dtype == "fp8":
            raise ConfigError("dtype", "fp8", "'auto', 'bf16', 'fp16' or 'fp32' of a draft decoder", "Use 'auto'.")

    def runnable_on(self, device: torch.device) -> "VaePair":
        """Itself, or the same files in "auto" where fp8 was asked for and the device has none."""
        no_fp8 = self._dtype == "fp8" and fp8_why_not(device) is not None
        return VaePair(*self._paths, "auto") if no_fp8 else self

    def nbytes(self, device: torch.device) -> int:
        wide = self._dtype == "fp32" or (self._dtype == "auto" and device.type == "cpu")
        plain = torch.float32 if wide else torch.float16  # as many bytes as bf16; int8 stays int8
        video = sum(entry.nbytes(FP8 if self._is_block(entry) else plain) for entry in self._video)
        return video + self._audio_values * 4

    def _is_block(self, entry: Entry) -> bool:
        """Whether FP8 is asked for, and this is a matrix that it is made of."""
        return self._dtype == "fp8" and len(entry.shape) == 2

    def working_bytes(self, tile_batch: int, height: int, width: int) -> int:
        """Bytes that decoding a canvas takes beside the weights, whatever its length."""
        batch = tile_batch or max(AUTO_TILE_BATCH.values())
        tiles = len(axis_tiles(height).starts) * len(axis_tiles(width).starts)
        pixels = min(TILE, height) * min(TILE, width) * tiles
        return batch * _TILE_BYTES + pixels * _TILE_PIXEL_BYTES + height * width * _PIXEL_BYTES + _SPARE_BYTES

    def _read(self, device: torch.device, check_interrupt: Callable[[], None]) -> tuple[VideoVAE | DraftVAE, AudioVAE]:
        video = load_video_vae(self._paths[0], self._dtype, device, only="decoder")
        check_interrupt()
        if self.note:
            log.warning("%s: %s", self._paths[0].name, self.note)
        return video, load_audio_vae(self._paths[1], device)


class VaeEncoder(_Read):
    """What encodes, of one of the two VAEs, in fp32. Implements `_host.Resident`; `vae` exists while it is loaded."""

    def __init__(self, load: Callable[[torch.device], VideoVAE | AudioVAE], values: int):
        self._load, self._nbytes = load, 4 * values

    @property
    def vae(self) -> VideoVAE | AudioVAE:
        return self._loaded

    def nbytes(self, device: torch.device) -> int:
        return self._nbytes

    def _read(self, device: torch.device, check_interrupt: Callable[[], None]) -> VideoVAE | AudioVAE:
        return self._load(device)
