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
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Most shared memory of a program: Turing, A100, other Ampere, Ada, Hopper, Blackwell for servers and for desks."""

CAPABILITIES = tuple(SHARED_KIB)
EVERY_DTYPE = (75, 80, 90)
"""Elsewhere bf16 stands for all, where a kernel takes it: the others lower as on the generation before."""


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
    elements: tuple[str, ...] = ("bf16", "fp16", "fp32")

    def __str__(self) -> str:
        return self.name.strip("_").removesuffix("_kernel")


def strides(*names: str) -> dict[str, str]:
    return {f"stride_{name}": "i32" for name in names}


def pointers(*names: str) -> dict[str, str]:
    return {f"{name}_ptr": "*T" for name in names}


def counts(*names: str) -> dict[str, str]:
    return {name: "i32" for name in names}


ROWS = {"rows_ptr": "*i32"}
OFFSETS = {"offsets_ptr": "*i32"}


def attend(capabilities: tuple[int, ...], head_dim: int, elements: tuple[str, ...]) -> Kernel:
    """The attention kernel as it is launched on the first of `capabilities`."""
    folder = "block_sparse_attention.triton_kernel"
    launch = importlib.import_module(f"comfyui_fasth3.kernels.{folder}").launch_for(divmod(capabilities[0], 10))
    tiles = f"tensordesc<T[64, {head_dim}]>" if launch.descriptors else "*T"
    lists = {f"{name}_ptr": "*i32" for name in ("full", "granules", "steps")}
    return Kernel(
        folder, "_attend_kernel",
        pointers("q", "k", "v", "out") | {"k_tiles": tiles, "v_tiles": tiles} | OFFSETS | lists
        | strides("qs", "qh", "ks", "kh", "vs", "vh", "os", "oh") | counts("V", "P", "K") | {"scale": "fp32"},
        {"D": head_dim, "DESCRIPTORS": launch.descriptors, "STAGES": launch.stages,
         "GRANULE_STAGES": launch.granule_stages},
        num_warps=launch.warps, capabilities=capabilities, elements=elements,
    )


def bounded(capabilities: tuple[int, ...], elements: tuple[str, ...], descriptors: bool) -> Kernel:
    queries, keys = (f"tensordesc<T[{rows}, 64]>" if descriptors else "*T" for rows in (128, 64))
    return Kernel(
        "bounded_attention.triton_kernel", "_bounded_attention_kernel",
        pointers("q", "k", "v", "out") | {"q_tiles": queries, "k_tiles": keys, "v_tiles": keys}
        | strides("qs", "qh", "ks", "kh", "vs", "vh", "out") | counts("N") | {"scale": "fp32"},
        {"D": 64, "BLOCK_M": 128, "BLOCK_N": 64, "TAIL": 16, "DESCRIPTORS": descriptors, "STAGES": 3},
        capabilities=capabilities, elements=elements,
    )


def row_kernels(out: str, top: int, capabilities: tuple[int, ...]) -> tuple[Kernel, ...]:
    """The token-wise kernels that end in rows of type `out`, quantised to +-top unless it is 0."""
    ends = {"out_ptr": f"*{out}", "row_scale_ptr": "*fp32"}
    row = Kernel(
        "quantise_rows.triton_kernel", "_quantise_rows_kernel", pointers("x") | ends | strides("x") | counts("C"),
        {"TOP": top, "BLOCK_C": 2048}, capabilities=capabilities,
    )
    return (
        Kernel(
            "residual_rms.triton_kernel", "_residual_rms_kernel",
            pointers("y", "bias") | {"x_ptr": "*fp32", "scale_ptr": "*fp32", "weight_ptr": "*fp32"} | ends
            | strides("x", "y") | counts("C") | {"eps": "fp32"},
            {"ADD": True, "BIAS": True, "TOP": top, "BLOCK_C": 2048}, capabilities=capabilities,
        ),
        Kernel(
            "swiglu.triton_kernel", "_swiglu_kernel",
            pointers("value", "gate", "bias") | ends | strides("value", "gate", "out") | counts("F"),
            {"BIAS": True, "TOP": top, "BLOCK_F": 16384 if top else 4096}, num_warps=8 if top else 4,
            capabilities=capabilities,
        ),
        *norm_kernels(ends if top else pointers("out"), top, capabilities),
        *([row] if top else []),
    )


def norm_kernels(ends: dict[str, str], top: int, capabilities: tuple[int, ...]) -> tuple[Kernel, Kernel]:
    """The transformer's norms, of which there are two forms each."""
    form = "quantise" if top else "modulate"
    sizes = {"TOP": top, "MAIN": 4096, "REST": 2048} if top else {"BLOCK_C": 2048}
    return tuple(
        Kernel(
            f"{op}.triton_kernel", f"_{op.removesuffix('modulate')}{form}_kernel",
            pointers(*rows, "weight", "scale", "shift") | ROWS | ends | strides(*rows, "scale", "shift")
            | {"eps": "fp32"},
            {"C": 5376, **sizes}, capabilities=capabilities,
        )
        for op, rows in (("rms_modulate", ("x",)), ("residual_rms_modulate", ("x", "y", "gate")))
    )


KERNELS = (
    Kernel("triton_probe", "_probe_kernel", pointers("x", "out"), {}, num_warps=1),
    Kernel(
        "gated_residual.triton_kernel", "_gated_residual_kernel",
        pointers("x", "y", "gate") | ROWS | strides("x", "y", "gate") | {"C": "i32"},
        {"BLOCK_C": 8192}, num_warps=8,
    ),
    Kernel(
        "qk_norm_rope.triton_kernel", "_qk_norm_rope_kernel",
        pointers("q", "k", "q_weight", "k_weight", "cos", "sin") | strides("qs", "qh", "ks", "kh", "cos", "sin")
        | {"H": "i32", "eps": "fp32"},
        {"R": 48, "D": 128, "BLOCK_H": 8, "BLOCK_R": 64, "BLOCK_REST": 32},
    ),
    *(
        Kernel(
            "int8_linear.triton_kernel", "_dequantise_int8_kernel",
            {"weight_ptr": "*i8", "scale_ptr": "*fp32", "rotation_ptr": "*fp16" if group else "*i8", "out_ptr": "*T"}
            | strides("weight") | counts("O", "I"),
            {"GROUP": group, "ROW_BLOCKS": 8, "BLOCK_O": rows, "BLOCK_I": columns}, capabilities=capabilities,
        )
        for group in (0, 256)
        for rows, columns, capabilities in ((32, 16, CAPABILITIES[:1]), (64, 128, CAPABILITIES[1:]))
    ),
    *(bounded((90,), ("bf16", "fp16"), descriptors) for descriptors in (False, True)),
    *row_kernels("T", 0, CAPABILITIES),
    *row_kernels("fp8e4nv", 448, (89, 90, 100, 120)),
    *row_kernels("i8", 127, CAPABILITIES),
    Kernel(
        "head_norm_rope.triton_kernel", "_head_norm_rope_kernel",
        pointers("x", "bias") | {"rotation_ptr": "*fp32"} | strides("s", "h") | counts("H", "N") | {"eps": "fp32"},
        {"BIAS": True, "D": 64, "BLOCK_H": 32},
    ),
    Kernel(
        "stitch_tiles.triton_kernel", "_stitch_tiles_kernel",
        pointers("tiles", "previous") | {f"{name}_ptr": "*fp32" for name in ("out", "scale", "shift")}
        | {"broken_ptr": "*i32"} | {f"{axis}_{name}_ptr": "*fp32" if name == "weight" else "*i32"
           for axis in ("row", "column") for name in ("tile", "at", "before", "weight")}
        | counts("K", "N", "h", "w", "H", "W", "first", "count", "fading"),
        {"PIXELS": True, "FRAMES": 4, "SIDE": 16, "BLOCK_X": 128},
    ),
    Kernel(
        "tile_mean.triton_kernel", "_tile_mean_kernel",
        pointers("x") | {"out_ptr": "*fp32"} | OFFSETS | strides("xs", "xh") | counts("N", "D"),
        {"ROWS": 8, "BLOCK_D": 128}, num_warps=1,
    ),
    Kernel(
        "tile_topk.triton_kernel", "_tile_topk_kernel",
        {"scores_ptr": "*fp32", "index_ptr": "*i32"} | strides("sh", "sv") | counts("V", "C", "K", "first", "kept"),
        {"BLOCK_C": 1024}, num_warps=1, elements=("fp32", "bf16"),
    ),
    Kernel(
        "coarse_branch.triton_kernel", "_coarse_vectors_kernel",
        pointers("coarse") | {"scores_ptr": "*fp32", "v_ptr": "*fp32"} | strides("sh", "sn") | counts("N", "D"),
        {"LOG2_E": 1, "SPLIT": True, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": 128},
        capabilities=CAPABILITIES[1:], elements=("bf16",),
    ),
    Kernel(
        "coarse_branch.triton_kernel", "_coarse_vectors_kernel",
        pointers("coarse") | {"scores_ptr": "*fp32", "v_ptr": "*fp32"} | strides("sh", "sn") | counts("N", "D"),
        {"LOG2_E": 1, "SPLIT": False, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": 128},
        elements=("fp16", "fp32"),
    ),
    Kernel(
        "coarse_branch.triton_kernel", "_gated_add_kernel",
        pointers("out", "coarse", "gate") | OFFSETS | strides("os", "oh", "gs", "gh") | counts("N", "D"),
        {"ROWS": 16, "BLOCK_D": 128}, num_warps=2,
    ),
    Kernel(
        "block_sparse_attention.steps", "_pack_lists_kernel",
        {f"{name}_ptr": "*i32" for name in ("offsets", "index", "count", "granules", "full", "steps")}
        | counts("num_tokens", "K"),
        {"BLOCK_K": 128}, num_warps=1, elements=("bf16",),
    ),
    *(
        attend(capabilities, head_dim, elements)
        for head_dim in (64, 128)
        for capabilities, elements in (
            ((75,), ("fp16",)), *((c, ("bf16", "fp16")) for c in ((80, 86, 89), (90,), (100,), (120,)))
        )
    ),
)
CASES = [
    pytest.param(kernel, capability, element, id=f"{kernel}-sm{capability}-{element}-{i}")
    for i, kernel in enumerate(KERNELS)
    for capability in kernel.capabilities
    for element in kernel.elements
    if element == "bf16" or capability in EVERY_DTYPE or "bf16" not in kernel.elements
]


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
@pytest.mark.parametrize(("kernel", "capability", "element"), CASES)
def test_compiles(kernel, capability, element):
    program = compiled(kernel, capability, element)
    assert "cubin" in program.asm
    assert program.metadata.shared <= SHARED_KIB[capability] * 1024


def test_every_kernel_has_a_row():
    assert kernels_under("triton.jit") == {(kernel.module, kernel.name) for kernel in KERNELS}


def test_every_gluon_kernel_is_compiled_by_a_test_of_its_own():
    """A new one is compiled by a test beside its numerics, as `test_compiles_for_hopper` is, and named here."""
    assert kernels_under("gluon.jit") == {
        ("block_sparse_attention.hopper_gluon", "attention_kernel"),
        ("linear_swiglu.hopper_gluon", "linear_swiglu_kernel"),
    }


def kernels_under(decorator: str) -> set[tuple[str, str]]:
    """(module below kernels/, name) of the functions under this decorator that are launched."""
    return {
        (".".join(path.relative_to(FOLDER).with_suffix("").parts), node.name)
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any(ast.unparse(d).startswith(decorator) for d in node.decorator_list)
    }
