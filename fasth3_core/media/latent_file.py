"""A sampled latent on disk, both streams bit for bit, with the report of its run: decode it later, or elsewhere.

A safetensors file with `video` [1, 24, T, h, w] and `audio` [1, 32, 2, A]; metadata `format`, `frames_per_second`,
`sample_rate` and, if there is one, `report` (JSON).
"""

import json
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..atomic import replacing
from ..errors import CheckpointError
from ..packing.geometry import FPS, SAMPLE_RATE
from ..report.run_report import RunReport, StepReport

FORMAT = "fasth3-latent-1"
SUFFIX = ".latent.safetensors"


def save(path: Path, video: torch.Tensor, audio: torch.Tensor, report: RunReport | None = None) -> None:
    """Write under a temporary name, then rename."""
    metadata = {"format": FORMAT, "frames_per_second": str(FPS), "sample_rate": str(SAMPLE_RATE)}
    if report is not None:
        metadata["report"] = json.dumps(report.to_dict())
    streams = {"video": video.detach().cpu().contiguous(), "audio": audio.detach().cpu().contiguous()}
    with replacing(path) as partial:
        save_file(streams, partial, metadata=metadata)


def load(path: Path) -> tuple[torch.Tensor, torch.Tensor, RunReport | None]:
    """Video, audio and report of a file of `save`.

    Raises:
        CheckpointError: truncated, no safetensors file, or not a latent.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or not {"video", "audio"} <= set(file.keys()):
                raise CheckpointError(
                    f"{path.name} is no latent ({metadata.get('format') or 'no format'} instead of {FORMAT}). Make one "
                    "with FastH3 Save Latent."
                )
            return file.get_tensor("video"), file.get_tensor("audio"), _report(metadata.get("report"), path.name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}. It may be cut short; save it again.") from error


def _report(text: str | None, name: str) -> RunReport | None:
    """Fields that this version does not know are left out."""
    if text is None:
        return None
    try:
        stored = _known(RunReport, json.loads(text))
        stored["steps"] = [StepReport(**_known(StepReport, step)) for step in stored.get("steps", [])]
        report = RunReport(**stored)
        report.to_text()  # whatever reads it later finds it whole
        return report
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name}: its report cannot be read: {error}.") from error


def _known(kind: type, stored: dict) -> dict:
    names = {entry.name for entry in fields(kind)}
    return {name: value for name, value in stored.items() if name in names}
