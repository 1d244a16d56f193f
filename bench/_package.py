"""Load the package from the repository root under its own name, as the tests and ComfyUI do, and say what runs it.

The root itself stays off sys.path, where its folders `nodes` and `kernels` would shadow other modules.
"""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
NAME = "comfyui_fasth3"


def load() -> ModuleType:
    """The package; afterwards `import comfyui_fasth3...` works without an installation."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]


def package(module: str) -> ModuleType:
    """A module of the package by its name below the root, such as "fasth3_core.contracts"."""
    load()
    return importlib.import_module(f"{NAME}.{module}")


def environment() -> dict[str, str]:
    """What a benchmark row must name to be compared later."""
    import torch

    try:
        triton = importlib.import_module("triton").__version__
    except ImportError:
        triton = "not installed"
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton, "commit": commit}
