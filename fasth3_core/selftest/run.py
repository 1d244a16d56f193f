"""Runs every recorded file of a folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ..checkpoint.component import read_json
from ..contracts import CONTRACTS
from ..errors import CheckpointError
from .dit import verify_comfy_dit, verify_dit
from .golden import Golden, Row, Target
from .sampler import verify_sampler, verify_sigmas
from .vae import verify_audio_vae, verify_video_vae
from .vsa import verify_int8_linear, verify_vsa_op

KINDS: dict[str, Callable[[Golden, Target], Iterator[Row]]] = {
    "vsa_op": verify_vsa_op,
    "int8_linear": verify_int8_linear,
    "dit": verify_dit,
    "comfy": verify_comfy_dit,
    "sampler": verify_sampler,
    "video_vae": verify_video_vae,
    "audio_vae": verify_audio_vae,
}
"""Kind, or what it begins with: "comfy_dit" and "comfy_keyframes" are compared alike."""
RUNGS = {"preview4": CONTRACTS["preview-4"].rungs, "v2_8": CONTRACTS["v2-8"].rungs}


def verify_file(path: Path, target: Target) -> Iterator[Row]:
    """Compare with one recorded file.

    Raises:
        CheckpointError: the file cannot be read, or is of a kind that nothing here computes.
    """
    if path.suffix == ".json":
        yield from verify_sigmas(path, read_json(path), RUNGS)
        return
    golden = Golden(path)
    verify = next((verify for kind, verify in KINDS.items() if f"{golden.kind}_".startswith(f"{kind}_")), None)
    if verify is None:
        raise CheckpointError(f"{path.name} is of kind {golden.kind!r}; known are {sorted(KINDS)}.")
    yield from verify(golden, target)


def recorded_files(folder: Path) -> list[Path]:
    """Every recorded file of a folder.

    Raises:
        CheckpointError: there is none.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("sigmas*.json")])
    if not files:
        raise CheckpointError(f"{folder} holds no recorded files (*.safetensors, sigmas*.json).")
    return files
