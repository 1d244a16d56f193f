"""Every Triton kernel compiles to machine code for every GPU generation that we name, on a machine without a GPU.

A new kernel is a new row of KERNELS; one without a row fails `test_every_kernel_has_a_row`.
"""

import ast
import importlib
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from comfyui_fasth3.kernels.device import INTERPRET

triton = pytest.importorskip("triton", reason="triton is not installed")

FOLDER = Path(__file__).resolve().parents[2] / "kernels"
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
"""Turing, A100, other Ampere, Ada, Hopper, Blackwell for servers, Blackwell for desks."""


@dataclass(frozen=True)
class Kernel:
    module: str
    """Below kernels/."""
    name: str
    types: dict[str, str]
    """Argument -> Triton's name of its type, of every argument that is no constant; "T" in it is the element type."""
    constants: dict[str, int]
    """As a full-size run launches it."""
    num_warps: int = 4
    capabilities: tuple[int, ...] = field(default=CAPABILITIES)

    def __str__(self) -> str:
        return self.name.strip("_").removesuffix("_kernel")


def strides(*names: str) -> dict[str, str]:
    return {f"stride_{name}": "i32" for name in names}


def pointers(*names: str) -> dict[str, str]:
    return {f"{name}_ptr": "*T" for name in names}


ROWS = {"rows_ptr": "*i32"}

KERNELS = (
    Kernel("triton_probe", "_probe_kernel", pointers("x", "out"), {}, num_warps=1),
    Kernel(
        "rms_modulate.triton_kernel", "_rms_modulate_kernel",
        pointers("x", "weight", "scale", "shift", "out") | ROWS | strides("x", "scale", "shift")
        | {"eps": "fp32"},
        {"C": 5376, "BLOCK_C": 2048},
    ),
    Kernel(
        "gated_residual.triton_kernel", "_gated_residual_kernel",
        pointers("x", "y", "gate") | ROWS | strides("x", "y", "gate") | {"C": "i32"},
        {"BLOCK_C": 8192}, num_warps=8,
    ),
    Kernel(
        "residual_rms_modulate.triton_kernel", "_residual_rms_modulate_kernel",
        pointers("x", "y", "gate", "weight", "scale", "shift", "out") | ROWS
        | strides("x", "y", "gate", "scale", "shift") | {"eps": "fp32"},
        {"C": 5376, "BLOCK_C": 2048},
    ),
    Kernel(
        "qk_norm_rope.triton_kernel", "_qk_norm_rope_kernel",
        pointers("q", "k", "q_weight", "k_weight", "cos", "sin") | strides("qs", "qh", "ks", "kh", "cos", "sin")
        | {"H": "i32", "eps": "fp32"},
        {"R": 48, "D": 128, "BLOCK_H": 8, "BLOCK_R": 64, "BLOCK_REST": 32},
    ),
    Kernel(
        "swiglu.triton_kernel", "_swiglu_kernel",
        pointers("gate", "value", "out") | strides("gate", "value") | {"F": "i32"},
        {"BLOCK_F": 4096},
    ),
)


def compiled(kernel: Kernel, capability: int, element: str):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"comfyui_fasth3.kernels.{kernel.module}"), kernel.name)
    types = {name: kind.replace("T", element) for name, kind in kernel.types.items()}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    assert types.keys() | kernel.constants.keys() == set(function.arg_names), f"the row of {kernel.name} is out of date"
    source = ASTSource(function, signature=signature, constexprs=kernel.constants)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton 3.9 announces a default of 3.10
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernel.num_warps})


@pytest.mark.skipif(INTERPRET, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    ("capability", "element"), [*((c, "bf16") for c in CAPABILITIES), (75, "fp16"), (90, "fp32")],
    ids=lambda value: f"sm{value}" if isinstance(value, int) else value,
)
def test_compiles(kernel, capability, element):
    if capability not in kernel.capabilities:
        pytest.skip(f"not for sm_{capability}")
    assert "cubin" in compiled(kernel, capability, element).asm


def test_every_kernel_has_a_row():
    found = {
        (".".join(path.relative_to(FOLDER).with_suffix("").parts), node.name)
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)
    }
    assert found == {(kernel.module, kernel.name) for kernel in KERNELS}
