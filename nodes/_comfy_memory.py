"""Our weights in ComfyUI's list of loaded models, so that it makes room for them and can take the room back.

ComfyUI keeps `ModelPatcher`s in that list and asks them to load, to unload and how large they are. This subclass
answers for weights that ComfyUI does not manage itself: what is to be on the device is there as a whole, or not at all.
"""

import weakref

import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch

from ._host import Resident, does_not_fit


class FastH3Weights(torch.nn.Module):
    """What ComfyUI takes for the model, and names in its log. It owns nothing; when it is gone, so are the weights."""


class ResidentPatcher(comfy.model_patcher.ModelPatcher):
    """One `Resident` in ComfyUI's list. Holds it weakly: a model that no node output refers to any more is freed."""

    def __init__(self, resident: Resident, device: torch.device):
        self._resident = weakref.ref(resident)
        self._total = max(1, resident.nbytes(device))
        module = FastH3Weights()
        module.device = device
        super().__init__(module, load_device=device, offload_device=torch.device("cpu"), size=self._total)

    def model_size(self) -> int:
        resident = self._resident()
        if resident is not None:  # streamed weights take less of the device, and may be placed otherwise next time
            self._total = max(1, resident.nbytes(self.load_device))
        return self._total

    def loaded_size(self) -> int:
        resident = self._resident()
        return self.model_size() if resident is not None and resident.location == self.load_device else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device  # ComfyUI then reckons with model_size() - loaded_size() still to come

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
        resident = self._resident()
        missing = self.model_size() - self.loaded_size()
        free = comfy.model_management.get_free_memory(device_to)
        if missing > free and not comfy.model_management.is_device_cpu(device_to):
            raise does_not_fit(missing, free, device_to)
        bar = comfy.utils.ProgressBar(self._total)
        try:
            resident.materialise(
                device_to,
                lambda done, total: bar.update_absolute(done, total),
                comfy.model_management.throw_exception_if_processing_interrupted,
            )
        except BaseException:  # an interrupt too: a half-loaded model must not keep its memory
            resident.release()
            raise
        return missing

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        return 0  # ComfyUI then unloads all of it

    def detach(self, unpatch_all=True):
        resident = self._resident()
        if unpatch_all and resident is not None:  # False: only its place in the list changes
            resident.release()
        return self.model

    def is_clone(self, other) -> bool:
        return getattr(other, "model", None) is self.model
