"""Runs under ComfyUI's Python with COMFY_APP set: our weights in ComfyUI's list of models. Prints "ok" at the end.

Started by test_comfy_memory.py in a process of its own, because ComfyUI's modules, `nodes` among them, must stay out of
the test process.
"""

import gc
import importlib.util
import logging
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [os.environ["COMFY_APP"], *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing(False)
from comfy.cli_args import args  # noqa: E402

args.cpu = True
import comfy.model_management as mm  # noqa: E402

spec = importlib.util.spec_from_file_location("pack", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])
from pack.fasth3_core.errors import ConfigError  # noqa: E402
from pack.nodes import _host  # noqa: E402

CPU = torch.device("cpu")
records = []


class Recorder(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())


logging.getLogger().addHandler(Recorder())


class Weights:
    def __init__(self, size=1000, fail=None):
        self.size, self.location, self.fail, self.loads = size, None, fail, 0

    def nbytes(self, device):
        return self.size

    def materialise(self, device, progress=None, check_interrupt=None):
        self.loads += 1
        if self.fail is not None:
            self.location = device  # half loaded
            raise self.fail
        progress(self.size, self.size)
        self.location = device

    def release(self):
        self.location = None


def listed():
    return [m for m in mm.loaded_models() if type(m).__name__ == "ResidentPatcher"]


host = _host.get()
assert type(host).__name__ == "ComfyHost"

# loaded, listed, and not loaded again
a = Weights()
host.acquire(a, CPU, 0)
host.acquire(a, CPU, 0)
assert a.location == CPU and len(listed()) == 1
assert listed()[0].model_size() == listed()[0].loaded_size() == 1000

# both stay while there is room
b = Weights()
host.acquire(b, CPU, 0)
assert a.location == b.location == CPU and len(listed()) == 2

# ComfyUI takes the room back when it needs it, from the longest unused first
pair, free, need = [a, b], 500, 1400


def get_free_memory(dev=None, torch_free_too=False):
    left = free + sum(1000 for weights in pair if weights.location is None)
    return (left, left) if torch_free_too else left


real, mm.get_free_memory = mm.get_free_memory, get_free_memory
mm.free_memory(need, CPU)
assert sorted((a.location is None, b.location is None)) == [False, True], "one of them is enough"
mm.get_free_memory = real
pair.clear()

# everything goes, and can come back
host.release_all()
assert a.location is b.location is None and listed() == []
host.acquire(a, CPU, 0)
assert a.location == CPU

# an interrupt while loading passes through, and nothing stays half loaded
c = Weights(fail=mm.InterruptProcessingException())
try:
    host.acquire(c, CPU, 0)
except mm.InterruptProcessingException:
    pass
else:
    raise AssertionError("the interrupt was swallowed")
assert c.location is None and len(listed()) == 1
c.fail = None
host.acquire(c, CPU, 0)
assert c.location == CPU

# weights that nothing refers to any more are freed and leave the list, without ComfyUI suspecting a leak
del a
gc.collect()
mm.cleanup_models_gc()
assert len(listed()) == 1, listed()
assert not [text for text in records if "leak" in text], records

# weights that do not fit are refused with the numbers, before any is read
mm.is_device_cpu, keep = (lambda device: False), mm.is_device_cpu
d = Weights(size=10 * 1024**3)
mm.get_free_memory = lambda dev=None, torch_free_too=False: (3 * 1024**3,) * 2 if torch_free_too else 3 * 1024**3
try:
    host.acquire(d, CPU, 0)
except ConfigError as error:
    assert "10.0 GiB" in str(error) and "3.0 GiB" in str(error), error
else:
    raise AssertionError("weights that do not fit were loaded")
assert d.loads == 0
mm.get_free_memory, mm.is_device_cpu = real, keep

# weights that are placed otherwise from run to run count for what they take each time
e = Weights(size=4000)
host.acquire(e, CPU, 0)
patcher = next(m for m in listed() if m.model_size() == 4000)
e.release()
e.size = 1500  # most of its blocks are streamed now
host.acquire(e, CPU, 0)
assert patcher in listed() and patcher.model_size() == patcher.loaded_size() == 1500

# what a machine can give: nothing on a device where there is none, and ComfyUI's own limits elsewhere
room = host.room(CPU)
assert room.device is None and room.host > 0 and room.pinnable == 0 and not room.spare_device
mm.is_device_cpu, keep = (lambda device: False), mm.is_device_cpu
mm.get_free_memory = lambda dev=None, torch_free_too=False: 3 * 1024**3
reserve, mm.EXTRA_RESERVED_VRAM = mm.EXTRA_RESERVED_VRAM, 1024**3  # --reserve-vram 1
mm.vram_state, state = mm.VRAMState.LOW_VRAM, mm.vram_state  # --lowvram
mm.MAX_PINNED_MEMORY, pinnable = 5000, mm.MAX_PINNED_MEMORY
room = host.room(CPU)
loaded = sum(m.loaded_size() for m in listed())
assert loaded > 0 and room.device == int((2 * 1024**3 + loaded) / 1.1), room
assert room.spare_device and room.pinnable == 5000
mm.get_free_memory, mm.is_device_cpu, mm.EXTRA_RESERVED_VRAM = real, keep, reserve
mm.vram_state, mm.MAX_PINNED_MEMORY = state, pinnable

# memory that is given back leaves the place in the list, and comes back
host.give_back(e)
assert e.location is None and patcher.loaded_size() == 0
host.acquire(e, CPU, 0)
assert e.location == CPU

# the other services of the host
assert host.wants_preview() == (args.preview_method != type(args.preview_method).NoPreviews)
update = host.progress(3)
update(1, None)
nested = host.nested((torch.zeros(1), torch.ones(2)))
assert type(nested).__module__ == "comfy.nested_tensor" and len(nested.unbind()) == 2
print("ok")
