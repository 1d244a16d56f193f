"""What a run ran on, for reports and `doctor`."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def own_version() -> str:
    """Of this package: a folder in ComfyUI's custom_nodes is not installed, so the project file is asked first."""
    try:
        found = re.search(r'^version = "([^"]+)"', _PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # installed from a wheel
        found = None
    return found.group(1) if found else version_of("comfyui-fasth3") or "unknown"


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, str]:
    """Versions and the device, of a report; nothing that names the machine or its user."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    triton = {} if (found := version_of("triton")) is None else {"triton": found}
    return {"comfyui-fasth3": own_version(), "torch": torch.__version__, **triton, "device": name}
