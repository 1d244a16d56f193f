"""Weights for checkpoint tests: those of the recorded files, in every AdaLN form, with and without gates."""

from pathlib import Path

import torch
from comfyui_fasth3.fasth3_core.checkpoint import names
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight
from comfyui_fasth3.kernels.int8_linear import hadamard
from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

FORMS = {"full": "dit_dense", "gates": "dit_vsa", "rank": "dit_rank", "curve": "comfy_curve_adaln"}
"""What a transformer has -> the recorded file that has it."""


def recorded(stem: str) -> dict[str, torch.Tensor]:
    """Weights of a recorded file under the names that it uses."""
    tensors = load_file(GOLDEN / f"{stem}.safetensors")
    return {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}


def canonical(form: str) -> dict[str, torch.Tensor]:
    tensors = names.to_canonical(recorded(FORMS[form]))
    tensors.setdefault("rope.inv_freq", 10000.0 ** (-torch.arange(16, dtype=torch.float32) / 16))
    return tensors


def assert_same(a: dict, b: dict) -> None:
    """The same names with bitwise the same values, quantised ones included."""
    assert a.keys() == b.keys()
    for name in a:
        x, y = ((v.data, v.scale, v.spec) if isinstance(v, QuantizedWeight) else (v,) for v in (a[name], b[name]))
        for left, right in zip(x, y, strict=True):
            same = torch.equal(left, right) and left.dtype == right.dtype if torch.is_tensor(left) else left == right
            assert same, name


def quantise(weight: torch.Tensor, group: int | None = None) -> QuantizedWeight:
    """int8 with one scale a row, rotated first when there is a group."""
    rotated = weight.float()
    if group:
        rotated = (rotated.view(-1, group) @ hadamard(group)).view_as(rotated)
    scale = rotated.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    return QuantizedWeight((rotated / scale).round().to(torch.int8), scale, "int8_tensorwise", group)
