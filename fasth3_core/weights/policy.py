"""In which dtype each weight is held: most in the run's, a few pinned because the result depends on it."""

import math
from collections import Counter
from collections.abc import Mapping

import torch

from ..checkpoint.dtypes import FLOATS, TORCH
from ..checkpoint.kinds import Entry
from ..errors import ConfigError
from .fp8 import FP8

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip

_FP32 = (
    "video_patch_proj.", "audio_patch_proj.", "time_embedder.", "final_layer.video_out.", "final_layer.audio_out.",
    "rope.", "adaln_t_table",
)  # fmt: skip
"""Patch embeddings, time, heads and tables: fp32 in training and in every run."""


def check_dtype(dtype: str) -> None:
    """Raises ConfigError unless it is "auto", "fp8" or a name of DTYPES."""
    if dtype not in ("auto", FP8, *DTYPES):
        raise ConfigError("dtype", dtype, f"'auto', 'fp8' or one of {list(DTYPES)}", "Use 'auto' if unsure.")


def weight_dtype(name: str, adaln: str, run: torch.dtype) -> torch.dtype:
    """Dtype of a canonical weight in a run whose residual stream is `run`.

    AdaLN of the rank form was fitted in fp16 and loses 1.7 times as much in bf16; in an fp32 run it is widened, which
    is exact. AdaLN of the curve form is fp32.
    """
    if name.startswith(_FP32):
        return torch.float32
    if adaln != "full" and ("adaln_proj." in name or name.startswith("adaln_basis.")):
        return torch.float32 if adaln == "curve" or run == torch.float32 else torch.float16
    return run


def stored_dtype(entries: Mapping[str, Entry], adaln: str) -> torch.dtype:
    """The float dtype that most unpinned values of a file have; bf16 where all of them are quantised."""
    counts: Counter[str] = Counter()
    for name, entry in entries.items():
        pinned = weight_dtype(name, adaln, torch.float64) != torch.float64
        if not pinned and entry.dtype in FLOATS:
            counts[entry.dtype] += math.prod(entry.shape)
    return TORCH[counts.most_common(1)[0][0]] if counts else torch.bfloat16


def run_dtype(requested: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """What "auto" means on a device: the file's bf16 or fp32 where a CUDA card computes bf16 natively, fp32 elsewhere.

    fp16 is never chosen: the residual stream of H3 reaches 1e6, past its range. A named dtype is obeyed. "fp8" says
    how the blocks' projections are kept; the rest is as with "auto".
    """
    if requested not in ("auto", FP8):
        return DTYPES[requested]
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return stored if native and stored != torch.float16 else torch.float32


def cast(name: str, weight: torch.Tensor, run: torch.dtype, adaln: str = "full") -> torch.Tensor:
    """A canonical float weight in memory, in the dtype it has in such a run."""
    return weight.to(weight_dtype(name, adaln, run))
