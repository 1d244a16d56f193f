"""Import the package as ComfyUI does: from a path, under one name, never through sys.path.

With the repository root on sys.path our folders `nodes` and `kernels` would shadow other modules, and
`python -m pytest` puts it there, so it is taken off again.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

if "comfyui_fasth3" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "comfyui_fasth3", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    sys.modules["comfyui_fasth3"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["comfyui_fasth3"])


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return GOLDEN


@pytest.fixture
def triton_device() -> str:
    """Where Triton kernels run here: the GPU, or the CPU under TRITON_INTERPRET=1."""
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that launch Triton kernels, by their own device or in one of their variants."""
    for item in items:
        variant = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if "triton_device" in item.fixturenames or "triton" in variant:
            item.add_marker("triton")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(42)


@pytest.fixture(autouse=True)
def _nan_filled_empty(monkeypatch):
    """Code that leaves part of its output unwritten must fail, not pass on recycled memory."""
    real = torch.empty

    def empty(*args, **kwargs):
        out = real(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", empty)
