"""From a path to a handle: headers are checked now, values are read when they are needed, straight to their device."""

import json
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...kernels.fp8_linear import fp8_why_not
from ..config import DiTConfig
from ..contracts import Record, against_record, chosen_by, infer
from ..errors import CheckpointError, ConfigError
from ..model.handle import H3Model
from ..vae import AudioVAE, VideoVAE
from ..vae.draft import DraftVAE, is_draft
from ..vae.video import FP8, NO_ENCODER
from ..vae.windows import WindowOptions
from ..weights.policy import DTYPES
from ..weights.shared import shared
from ..weights.store import FileStore
from . import audio_names, names, vae_names
from .component import Component, open_component, read_json
from .draft_names import plan_draft_decoder
from .kinds import Plan
from .reading import FileReader
from .window_choice import recall

log = logging.getLogger("fasth3")

TRANSFORMER_FOLDERS = ("transformer", "transformer_ref")
VIDEO_VAE_FOLDERS = ("vae", "video_vae")
AUDIO_VAE_FOLDERS = ("audio_vae",)

RECORD = "fastvideo_inference.json"
"""Beside the weights or at the root of a release: the contract that a student was distilled for."""

RECORD_KEY = "fasth3.contract"
"""Header metadata in which a file made by `quantize` carries the same fields, as JSON."""


def load_model(
    path: str | Path, *, contract: str = "auto", dtype: str = "auto", layout: str = "auto"
) -> H3Model:
    """Open a transformer: a file, a folder of shards, their index, or a repository root with one transformer.

    Args:
        contract: "auto", or a name of `contracts.CONTRACTS`.
        dtype: "auto", "bf16", "fp16" or "fp32"; decided when the weights move to a device. "fp8" quantises the blocks'
            projections as they are read and is "auto" for the rest.
        layout: "auto", or a name of `names.LAYOUTS`; needed for fused shards outside the official folder tree.

    Loading the same files again, with the same dtype and layout, gives a handle on the same store while it is in use.

    Raises:
        CheckpointError: not a whole transformer; lists what is wrong, before anything is allocated.
        ContractError: the contract does not fit, or "auto" cannot know it.
    """
    component = open_component(path, TRANSFORMER_FOLDERS)
    key = (component.fingerprint, dtype, layout)
    opened = Opened(component, lambda: names.plan_transformer(component, layout), dtype, contract, key)
    store = open_store(opened)
    recorded = recorded_contract(component)
    decided = infer(store.config, gates_zero=store.gates_all_zero(), recorded=recorded, requested=contract)
    chosen = chosen_by(store.config, recorded, contract)
    log.info("contract %s (by %s)", decided.name, chosen)
    details = {
        "layout": store.plan.layout,
        "bytes_on_disk": component.nbytes,
        "quantised_layers": len(store.plan.quantised),
        "recorded_contract": recorded is not None,
        "contract_by": chosen,
    }
    departures = against_record(decided, recorded) if recorded is not None and contract != "auto" else ()
    return H3Model(store.config, decided, store, str(component.root), details, departures, opened)


@dataclass(frozen=True)
class Opened:
    """The files of a model and how they are read: all that its store is made from."""

    component: Component
    plan: Callable[[], Plan]
    dtype: str
    contract: str
    """As it was asked for: "auto" or a name."""
    key: Hashable
    """Equal for the same weights in the same form."""


def open_store(opened: Opened) -> FileStore:
    """The store of these files: the one that is in use already, if there is one."""

    def make() -> FileStore:
        plan, component = opened.plan(), opened.component
        return FileStore(component, plan, DiTConfig.from_shapes(plan.shapes, component.config), opened.dtype)

    return shared(opened.key, make)


def recorded_contract(component: Component) -> Record | None:
    """What `fastvideo_inference.json` says in the component's folder or the one above, which is the release's root.

    A single file takes the one beside it only where it is alone in its folder. A file that this package made from a
    recorded model has the fields in its header.
    """
    if RECORD_KEY in component.metadata:
        try:
            fields = json.loads(component.metadata[RECORD_KEY])
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise CheckpointError(f"{component.label}: {RECORD_KEY} in its header is no JSON object.")
        return Record(fields, f"{RECORD_KEY} in the header of {component.root.name}")
    folders = [component.folder, component.folder.parent] if component.root.is_dir() else []
    if not folders and len(list(component.folder.glob("*.safetensors"))) == 1:
        folders = [component.folder]
    found = next((folder / RECORD for folder in folders if (folder / RECORD).is_file()), None)
    return None if found is None else Record(read_json(found), RECORD)


def load_video_vae(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    *,
    only: str = "",
    windows: WindowOptions | None = None,
) -> VideoVAE | DraftVAE:
    """Open the video VAE, or a draft decoder, and read it to `device`.

    Args:
        dtype: of the decoder's products. "auto" is fp16 on an accelerator and fp32 on the CPU; "fp8" quantises those
            of the blocks when they are read, for an NVIDIA GPU that has float8.
        only: "decoder" or "encoder" to read no more than that.
        windows: of a decoder of whole frames; None takes what probe-decoder found out about the file, if it did.

    Raises:
        CheckpointError: not a whole video VAE, or one whose decoder is not known how to run.
    """
    device = torch.device(device)
    component = open_component(path, VIDEO_VAE_FOLDERS)
    if is_draft(component.tensors):
        if only == "encoder":
            raise CheckpointError(NO_ENCODER)
        with _lazy(component, plan_draft_decoder(component), device) as tensors:
            return DraftVAE.from_tensors(tensors, video_vae_dtype(dtype, device), device)
    plan = vae_names.plan_video_vae(component)
    head_dim = vae_names.decoder_head_dim(component.config)
    windows = windows or (recall(component.root) if component.root.is_file() else None)
    with _lazy(component, plan, device) as tensors:
        return VideoVAE.from_tensors(
            tensors, video_vae_dtype(dtype, device), device, head_dim=head_dim, only=only, windows=windows
        )


def load_audio_vae(path: str | Path, device: torch.device | str = "cpu") -> AudioVAE:
    """Open the audio VAE and read it to `device`; fp32 always."""
    component = open_component(path, AUDIO_VAE_FOLDERS)
    with _lazy(component, audio_names.plan_audio_vae(component), torch.device(device)) as tensors:
        return AudioVAE.from_tensors(tensors, torch.float32, device)


def video_vae_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """What load_video_vae's `dtype` is on a device. Raises ConfigError if it is nothing there."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype == "fp8":
        if (why := fp8_why_not(device)) is not None:
            others = f"'auto' or one of {list(DTYPES)} on {device}"
            raise ConfigError("dtype", dtype, others, f"There is no fp8 on it: {why}.")
        return FP8
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"'auto', 'fp8' or one of {list(DTYPES)}", "Use 'auto' if unsure.")
    return DTYPES[dtype]


@contextmanager
def _lazy(component: Component, plan: Plan, device: torch.device) -> Iterator["_LazyTensors"]:
    with torch.inference_mode(False), torch.no_grad(), component.open(device) as reader:
        yield _LazyTensors(plan, reader)


class _LazyTensors(Mapping[str, Any]):
    """Canonical tensors, or quantised weights, that are read when they are asked for: never twice in memory."""

    def __init__(self, plan: Plan, reader: FileReader) -> None:
        self._plan, self._reader = plan, reader

    def __getitem__(self, name: str) -> Any:
        return self._plan.entries[name].load(self._reader)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.entries)

    def __len__(self) -> int:
        return len(self._plan.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._plan.entries
