"""The token-wise ops: every implementation against the fp32 reference, odd shapes, with tolerances that bite."""

import pytest
import torch
from comfyui_fasth3.kernels import device
from comfyui_fasth3.kernels.device import INTERPRET, Case
from comfyui_fasth3.kernels.gated_residual import gated_residual
from comfyui_fasth3.kernels.qk_norm_rope import eager as qk_eager
from comfyui_fasth3.kernels.qk_norm_rope import qk_norm_rope
from comfyui_fasth3.kernels.quantise_rows import FORMS
from comfyui_fasth3.kernels.registry import BackendUnavailable, resolve
from comfyui_fasth3.kernels.residual_rms_modulate import residual_rms_modulate
from comfyui_fasth3.kernels.rms_modulate import rms_modulate
from comfyui_fasth3.kernels.segments import Segments
from comfyui_fasth3.kernels.swiglu import swiglu

from .rows import assert_quantised

SPANS = ((0, 3, 1), (3, 4, 0), (4, 13, 2))
S, C = 13, 80
EPS = 1e-5
# relative L2: eager has a few roundings, each at most half the dtype's epsilon (6e-8, 3.9e-3, 4.9e-4)
EAGER = {torch.float32: 5e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# a Triton kernel has one, 0.42 of that half in the root mean square; its interpreter truncates to bf16: twice as much
TRITON = {torch.float32: 5e-7, torch.bfloat16: 4e-3 if INTERPRET else 2e-3, torch.float16: 2.5e-4}
DTYPES = pytest.mark.parametrize("dtype", list(EAGER), ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(params=["eager", "triton"])
def run(request):
    """(backend, device, assert_close) of one implementation."""
    device = request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"
    tolerances = TRITON if request.param == "triton" else EAGER

    def assert_close(out, reference):
        def error(x):
            return ((x - reference).norm() / reference.norm()).item()

        assert error(out.float()) <= tolerances[out.dtype]
        assert error(out.float() * 1.01) > tolerances[out.dtype]

    return request.param, device, assert_close


def strided(*shape, dtype, device):
    """Random values in rows that lie apart, NaN between them; and a function that says whether that is untouched."""
    buffer = torch.full((*shape[:-1], shape[-1] + 16), float("nan"), dtype=dtype, device=device)
    view = buffer[..., : shape[-1]]
    view.copy_(torch.randn(shape))
    return view, lambda: bool(buffer[..., shape[-1] :].isnan().all()) and not bool(view.isnan().any())


def modulation(count, dtype, device, channels=C):
    """`count` row-strided [3, C] tensors, as slices of one table are."""
    return torch.randn(3, count, channels).to(device, dtype).unbind(1)


def wide(*tensors):
    return [t.float().clone() for t in tensors]


@DTYPES
def test_rms_modulate(dtype, run):
    backend, device, assert_close = run
    x, intact = strided(S, C, dtype=dtype, device=device)
    weight, (scale, shift) = torch.rand(C).to(device, dtype) + 0.5, modulation(2, dtype, device)
    segments, before = Segments.of(SPANS, device), x.clone()
    out = rms_modulate(x, weight, scale, shift, segments, EPS, backend=backend)
    assert torch.equal(x, before) and intact() and out.dtype == dtype
    reference = rms_modulate(*wide(x, weight, scale, shift), segments, EPS, backend="reference")
    assert_close(out, reference)


@DTYPES
def test_gated_residual(dtype, run):
    backend, device, assert_close = run
    (x, x_intact), (y, y_intact) = (strided(S, C, dtype=dtype, device=device) for _ in range(2))
    (gate,), segments = modulation(1, dtype, device), Segments.of(SPANS, device)
    reference = gated_residual(*wide(x, y, gate), segments, backend="reference")
    out = gated_residual(x, y, gate, segments, backend=backend)
    assert out is x and x_intact() and y_intact()
    assert_close(out, reference)


@DTYPES
def test_residual_rms_modulate_is_the_two_ops(dtype, run):
    backend, device, assert_close = run
    (x, x_intact), (y, y_intact) = (strided(S, C, dtype=dtype, device=device) for _ in range(2))
    weight, (gate, scale, shift) = torch.rand(C).to(device, dtype) + 0.5, modulation(3, dtype, device)
    segments = Segments.of(SPANS, device)
    two = gated_residual(x.clone(), y, gate, segments, backend=backend)
    h_two = rms_modulate(two, weight, scale, shift, segments, EPS, backend=backend)
    h_reference = rms_modulate(*wide(two, weight, scale, shift), segments, EPS, backend="reference")
    h = residual_rms_modulate(x, y, gate, weight, scale, shift, segments, EPS, backend=backend)
    assert x_intact() and y_intact()
    assert torch.equal(x, two) and torch.equal(h, h_two)
    assert_close(h, h_reference)


@pytest.mark.parametrize("C", [80, 84, 128])
@pytest.mark.parametrize("form", list(FORMS))
@DTYPES
def test_norms_quantised(dtype, form, C, run):
    """Quantised from fp32, whatever x's dtype; what is kept of the stream is as without a form."""
    backend, device, _ = run
    if backend == "triton" and form == "fp8" and INTERPRET:
        pytest.skip("the interpreter loses the carry when it rounds to float8: needs a CUDA device")
    rounding = EAGER[dtype] if backend == "eager" else 1e-6
    (x, x_intact), (y, y_intact) = (strided(S, C, dtype=dtype, device=device) for _ in range(2))
    weight, (gate, scale, shift) = torch.rand(C).to(device, dtype) + 0.5, modulation(3, dtype, device, C)
    segments, kept = Segments.of(SPANS, device), x.clone()

    def expected():
        return rms_modulate(*wide(x, weight, scale, shift), segments, EPS, backend="reference")

    alone = rms_modulate(x, weight, scale, shift, segments, EPS, form, backend=backend)
    assert torch.equal(x, kept) and x_intact()
    assert_quantised(alone, expected(), form, rounding)
    residual_rms_modulate(kept, y, gate, weight, scale, shift, segments, EPS, backend=backend)
    both = residual_rms_modulate(x, y, gate, weight, scale, shift, segments, EPS, form, backend=backend)
    assert torch.equal(x, kept) and x_intact() and y_intact()
    assert_quantised(both, expected(), form, rounding)


@pytest.mark.parametrize(("H", "D", "R", "dtype"), [
    pytest.param(3, 32, 12, torch.float32, id="H3-D32-R12-float32"),
    pytest.param(9, 64, 32, torch.float32, id="H9-D64-R32-float32"),
    pytest.param(2, 80, 30, torch.float16, id="H2-D80-R30-float16"),
    pytest.param(1, 128, 48, torch.bfloat16, id="H1-D128-R48-bfloat16"),
])
def test_qk_norm_rope_on_slices_of_the_fused_projection(H, D, R, dtype, run, monkeypatch):
    backend, device, assert_close = run
    monkeypatch.setattr(qk_eager, "ROWS", 10)
    fused = torch.randn(S, 3, H, D).to(device, dtype)
    q, k, v = fused.unbind(1)
    v_before = v.clone()
    q_weight, k_weight = torch.rand(2, D).to(device, dtype) + 0.5
    angles = torch.randn(S, R, device=device) * 10
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q_fp32, k_fp32, *rest = wide(q, k, q_weight, k_weight, cos, sin)
    qk_norm_rope(q_fp32, k_fp32, *rest, EPS, backend="reference")
    qk_norm_rope(q, k, q_weight, k_weight, cos, sin, EPS, backend=backend)
    assert torch.equal(v, v_before)
    assert_close(q, q_fp32)
    assert_close(k, k_fp32)


def test_rotation_keeps_the_pass_through_channels(run):
    backend, device, _ = run
    q, k = torch.randn(2, 5, 2, 16, device=device)
    zero = torch.zeros(5, 6, device=device)
    expected = [torch.nn.functional.rms_norm(x, (16,), eps=EPS) for x in (q, k)]
    one = torch.ones(16, device=device)
    qk_norm_rope(q, k, one, one, zero + 1, zero, EPS, backend=backend)
    torch.testing.assert_close([q, k], expected, rtol=0, atol=1e-6)


def test_swiglu_in_several_blocks(run):
    backend, device, assert_close = run
    value, gate = torch.randn(2, 2, 4100, device=device)
    expected = swiglu(value, gate, backend="reference")
    assert_close(swiglu(value, gate, backend=backend), expected)


def test_swiglu_halves_are_not_the_same():
    value, gate = torch.randn(2, 3, 8)
    assert not torch.allclose(swiglu(value.clone(), gate.clone()), swiglu(gate.clone(), value.clone()))


def test_triton_refuses_what_it_cannot_index(triton_device):
    x = torch.randn(4, 8, device=triton_device)
    with pytest.raises(BackendUnavailable, match="last dimension of stride 1"):
        swiglu(x.t(), x.t(), backend="triton")
    with pytest.raises(BackendUnavailable, match="fp16, bf16 or fp32, got"):
        swiglu(x.double(), x.double(), backend="triton")
    with pytest.raises(BackendUnavailable, match="requires grad"):
        swiglu(x.requires_grad_(), x, backend="triton")
    gate = torch.randn(8, 3, device=triton_device).t()
    with pytest.raises(ValueError, match=r"gated_residual: gate .* the last must be 1"):
        gated_residual(x.detach(), x.detach(), gate, Segments.of([(0, 4, 0)], triton_device), backend="triton")


@pytest.mark.parametrize("spans", [[(1, 5, 0)], [(0, 5, 0), (6, 7, 0)], [(0, 5, 0), (5, 5, 1)], [(0, 5, -1)]])
def test_segments_must_cover_in_order(spans):
    with pytest.raises(ValueError, match="does not follow token"):
        Segments.of(spans, "cpu")


def test_segments_give_every_token_its_row():
    segments = Segments.of(SPANS, "cpu")
    assert segments.rows.tolist() == [1] * 3 + [0] + [2] * 9
    part = segments.part(2, 6)
    assert part.spans == ((0, 1, 1), (1, 2, 0), (2, 4, 2)) and part.rows.tolist() == [1, 0, 2, 2]
    assert segments.part(3, 4).spans == ((0, 1, 0),)


def test_a_toolchain_that_cannot_launch_is_a_refusal(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from comfyui_fasth3.kernels import triton_probe

    def probe(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(triton_probe, "probe", probe)
    monkeypatch.setattr(device, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    case = Case(device=torch.device("cuda", 99), dtype=torch.bfloat16)
    run = resolve("swiglu", "auto", case)
    why = "triton cannot launch on cuda:99 in torch.bfloat16: RuntimeError: Failed to find C compiler."
    assert run.name == "eager" and run.refused == {"triton": why}
    with pytest.raises(BackendUnavailable, match="Failed to find C compiler"):
        resolve("swiglu", "triton", case)
