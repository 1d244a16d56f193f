"""The nodes' surroundings inside ComfyUI."""

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import comfy.model_management
import comfy.nested_tensor
import comfy.utils
import folder_paths
import psutil
import torch
from comfy.cli_args import LatentPreviewMethod, args
from PIL import Image

from ..fasth3_core.weights.placement import Room
from ._comfy_memory import ResidentPatcher
from ._host import OutputFile, Resident

log = logging.getLogger("fasth3")


class ComfyHost:
    """Implements `_host.Host` with ComfyUI's own folders, progress bar, interrupt flag and model list."""

    def __init__(self) -> None:
        self._patchers: weakref.WeakKeyDictionary[Resident, ResidentPatcher] = weakref.WeakKeyDictionary()

    def model_roots(self, folder: str) -> list[Path]:
        return [Path(root) for root in folder_paths.get_folder_paths(folder)]

    def input_dir(self) -> Path:
        return Path(folder_paths.get_input_directory())

    def output_dir(self) -> Path:
        return Path(folder_paths.get_output_directory())

    def output_file(self, prefix: str, suffix: str, width: int = 0, height: int = 0) -> OutputFile:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            prefix, folder_paths.get_output_directory(), width, height
        )
        filename = f"{name}_{counter:05}_{suffix}"
        return OutputFile(Path(folder) / filename, filename, subfolder)

    def device(self) -> torch.device:
        return comfy.model_management.get_torch_device()

    def progress(self, total: int) -> Callable[[int, Image.Image | None], None]:
        bar = comfy.utils.ProgressBar(total)

        def update(done: int, preview: Image.Image | None = None) -> None:
            bar.update_absolute(done, total, None if preview is None else ("JPEG", preview, args.preview_size))

        return update

    def wants_preview(self) -> bool:
        return args.preview_method != LatentPreviewMethod.NoPreviews

    def wants_metadata(self) -> bool:
        return not args.disable_metadata

    def check_interrupt(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    def show_text(self, node_id: str | None, text: str) -> None:
        from server import PromptServer  # not at the top: pulls in the web server, absent in some embeddings

        server = getattr(PromptServer, "instance", None)
        if server is not None and node_id is not None:
            server.send_progress_text(text, node_id)

    def acquire(self, resident: Resident, device: torch.device, working_bytes: int) -> None:
        patcher = self._patchers.get(resident)
        if patcher is None or patcher.load_device != device:
            patcher = self._patchers[resident] = ResidentPatcher(resident, device)
        comfy.model_management.load_models_gpu([patcher], memory_required=working_bytes)

    def room(self, device: torch.device) -> Room:
        management = comfy.model_management
        on_device = None
        if not management.is_device_cpu(device):
            loaded = sum(m.loaded_size() for m in management.loaded_models() if m.load_device == device)
            # ComfyUI asks for a tenth more than a model takes, and keeps what --reserve-vram says
            on_device = int((management.get_free_memory(device) + loaded - management.extra_reserved_memory()) / 1.1)
        return Room(
            device=on_device,
            host=psutil.virtual_memory().available,
            pinnable=max(0, int(management.MAX_PINNED_MEMORY - management.TOTAL_PINNED_MEMORY)),
            folder=Path(folder_paths.get_temp_directory()),
            spare_device=management.vram_state in (management.VRAMState.LOW_VRAM, management.VRAMState.NO_VRAM),
        )

    def give_back(self, resident: Resident) -> None:
        resident.release()
        comfy.model_management.soft_empty_cache()

    def release_all(self) -> None:
        comfy.model_management.unload_all_models()
        comfy.model_management.soft_empty_cache()

    def nested(self, tensors: Sequence[torch.Tensor]):
        return comfy.nested_tensor.NestedTensor(tensors)
