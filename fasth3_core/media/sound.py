"""A sound track on its way into a file: cut to the frames, fit to be encoded, and kept raw where something is wrong."""

import os
from dataclasses import dataclass
from fractions import Fraction

import av
import torch

from ..errors import GeometryError
from ..packing.geometry import FPS

LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True)
class Sound:
    """Samples [1 or 2, L] in [-1, 1], all finite, and their rate. Make one with `fit`."""

    wave_CL: torch.Tensor
    rate: int

    @property
    def layout(self) -> str:
        return LAYOUTS[self.wave_CL.shape[0]]

    def frame(self, start: int, stop: int, sample_format: str) -> av.AudioFrame:
        """Samples start ... stop in one of FFmpeg's forms: "fltp", or "s32" with 24 bits in use."""
        part_CL = self.wave_CL[:, start:stop]
        if sample_format == "s32":
            whole = part_CL.double().mul(2**23 - 1).round().to(torch.int32) << 8
            samples = whole.T.reshape(1, -1)
        else:
            samples = part_CL
        frame = av.AudioFrame.from_ndarray(samples.contiguous().numpy(), format=sample_format, layout=self.layout)
        frame.sample_rate, frame.pts, frame.time_base = self.rate, start, Fraction(1, self.rate)
        return frame


def fit(wave_CL: torch.Tensor, rate: int, frames: int) -> Sound:
    """Cut the sound, or continue it with silence, to round(frames / 24 * rate) samples. Numbers that are not finite
    become silence and the rest is clamped: a broken sound track must not cost the picture.

    Raises GeometryError unless it is [1 or 2, samples].
    """
    if wave_CL.ndim != 2 or wave_CL.shape[0] not in LAYOUTS:
        raise GeometryError(f"audio must be [1 or 2, samples], got {list(wave_CL.shape)}.")
    wave_CL = wave_CL.detach().float().cpu().nan_to_num(0, 0, 0).clamp(-1, 1)
    wave_CL = torch.nn.functional.pad(wave_CL, (0, round(frames * rate / FPS) - wave_CL.shape[1]))
    return Sound(wave_CL, rate)


def write_wav(path: str | os.PathLike, wave_CL: torch.Tensor, rate: int) -> None:
    """32-bit floats as they are, infinities and all: what there is to find out what went wrong."""
    wave_CL = wave_CL.detach().float().cpu()
    with av.open(str(path), "w", format="wav") as container:
        layout = LAYOUTS.get(wave_CL.shape[0], f"{wave_CL.shape[0]} channels")
        stream = container.add_stream("pcm_f32le", rate=rate, layout=layout)
        for start in range(0, wave_CL.shape[1], rate):
            part_1L = wave_CL[:, start : start + rate].T.reshape(1, -1).contiguous()
            frame = av.AudioFrame.from_ndarray(part_1L.numpy(), format="flt", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
