"""linear_swiglu against fp32 on odd sizes; the Hopper kernel compiles anywhere and runs on a Hopper GPU."""

import pytest
import torch
from comfyui_fasth3.kernels.device import INTERPRET, Case
from comfyui_fasth3.kernels.linear_swiglu import gluon_why_not, linear_swiglu
from comfyui_fasth3.kernels.registry import BackendUnavailable

CUDA = torch.device("cuda")


@pytest.fixture(params=["eager", "hopper"])
def run(request):
    """(backend, device) of one implementation."""
    if request.param == "hopper":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        if (why := gluon_why_not(Case(device=CUDA, dtype=torch.float16))) is not None:
            pytest.skip(why)
    return request.param, CUDA if request.param == "hopper" else torch.device("cpu")


def make(S, C, F, dtype, device):
    """x with NaN around its columns and rows; weights that keep gates within some units."""
    x = torch.full((S + 3, C + 24), float("nan"), dtype=dtype, device=device)
    x[:S, 8 : 8 + C] = torch.randn(S, C).to(device, dtype)
    weight, bias = torch.randn(2 * F, C) * C**-0.5, torch.randn(2 * F)
    return x[:S, 8 : 8 + C], weight.to(device, dtype), bias.to(device, dtype)


def error(out, truth):
    return ((out.float() - truth).norm() / truth.norm()).item()


# relative L2: eager rounds both halves, silu and the result; the fused one the result alone
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(("S", "C", "F"), [(9, 64, 40), (197, 128, 136), (128, 320, 128), (300, 72, 264)])
def test_against_fp32(S, C, F, dtype, tolerance, run):
    backend, device = run
    x, weight, bias = make(S, C, F, dtype, device)
    truth = linear_swiglu(x.float(), weight.float(), bias.float(), backend="reference")
    out = linear_swiglu(x, weight, bias, backend=backend)
    assert out.shape == (S, F) and out.dtype == dtype
    assert error(out, truth) <= tolerance < error(out.float() * 1.01, truth)


def test_more_tiles_than_programs(run):
    """A program takes several tiles: what one leaves behind must not reach the next."""
    backend, device = run
    x, weight, bias = make(1797, 256, 2048, torch.float16, device)
    truth = linear_swiglu(x.float(), weight.float(), bias.float(), backend="reference")
    first = linear_swiglu(x, weight, bias, backend=backend)
    assert error(first, truth) <= 1e-3
    assert all(torch.equal(linear_swiglu(x, weight, bias, backend=backend), first) for _ in range(3))


def test_what_the_copy_engine_cannot_address(run):
    backend, device = run
    if backend == "eager":
        pytest.skip("torch takes any")
    x, weight, bias = make(5, 68, 16, torch.float16, device)
    with pytest.raises(ValueError, match="rows 16 bytes apart"):
        linear_swiglu(x, weight, bias, backend="hopper")


def test_elsewhere_it_says_why():
    with pytest.raises(BackendUnavailable, match="needs an NVIDIA GPU, got cpu"):
        linear_swiglu(torch.zeros(1, 8), torch.zeros(16, 8), torch.zeros(16), backend="hopper")


@pytest.mark.skipif(INTERPRET, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_compiles_for_hopper(element):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    hopper = pytest.importorskip("comfyui_fasth3.kernels.linear_swiglu.hopper_kernel")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = hopper.linear_swiglu_kernel
    boxes = {"x_boxes": [64, 64], "w_boxes": [128, 64], "out_boxes": [64, 128]}
    constants = {name: getattr(hopper, name) for name in ("STAGES", "BAND", "LAG", "REGISTERS", "COPY_REGISTERS")}
    kinds = {name: f"tensordesc<{element}{box},{hopper.LAYOUT!r}>" for name, box in boxes.items()}
    kinds |= {name: "constexpr" for name in constants} | {"bias_ptr": f"*{element}"}
    source = GluonASTSource(kernel, {name: kinds.get(name, "i32") for name in kernel.arg_names}, constants)
    options = {"num_warps": 4, "maxnreg": hopper.MAX_REGISTERS}
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "cubin" in program.asm
    assert program.metadata.shared <= 227 * 1024
