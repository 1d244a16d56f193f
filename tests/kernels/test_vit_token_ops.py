"""The token-wise ops of the video decoder: every implementation against the fp32 reference, odd shapes, NaN around."""

import pytest
import torch
from comfyui_fasth3.kernels.device import INTERPRET, Case
from comfyui_fasth3.kernels.head_norm_rope import head_norm_rope
from comfyui_fasth3.kernels.quantise_rows import FORMS, quantise_rows
from comfyui_fasth3.kernels.registry import BackendUnavailable, resolve
from comfyui_fasth3.kernels.residual_rms import residual_rms
from comfyui_fasth3.kernels.swiglu import swiglu

from .rows import assert_quantised, error

S, C = 13, 80
EPS = 1e-5
# relative L2: eager has a few roundings, each at most half the dtype's epsilon (6e-8, 3.9e-3, 4.9e-4); Triton has one
EAGER = {torch.float32: 5e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TRITON = {torch.float32: 5e-7, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}
DTYPES = pytest.mark.parametrize("dtype", list(EAGER), ids=lambda dtype: str(dtype).removeprefix("torch."))
FORM = pytest.mark.parametrize("form", list(FORMS))



@pytest.fixture(params=["eager", "triton"])
def run(request):
    """(backend, device, assert_close) of one implementation."""
    form = request.node.callspec.params.get("form")
    if request.param == "triton" and form == "fp8" and INTERPRET:
        pytest.skip("the interpreter loses the carry when it rounds to float8: needs a CUDA device")
    device = request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"
    tolerances = TRITON if request.param == "triton" else EAGER

    def assert_close(out, reference):
        assert error(out, reference) <= tolerances[out.dtype] < error(out.float() * 1.01, reference)

    return request.param, device, assert_close


def strided(*shape, dtype, device):
    """Random values in rows that lie apart, NaN between them; and a function that says whether that is untouched."""
    buffer = torch.full((*shape[:-1], shape[-1] + 16), float("nan"), dtype=dtype, device=device)
    view = buffer[..., : shape[-1]]
    view.copy_(torch.randn(shape))
    return view, lambda: bool(buffer[..., shape[-1] :].isnan().all()) and not bool(view.isnan().any())


@DTYPES
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
def test_residual_rms(dtype, with_bias, run):
    backend, device, assert_close = run
    x, x_intact = strided(S, C, dtype=torch.float32, device=device)
    y, y_intact = strided(S, C, dtype=dtype, device=device)
    scale, weight = torch.rand(2, C, device=device) + 0.5
    bias = torch.randn(C, device=device).to(dtype) if with_bias else None
    expected_x = x.clone()
    expected = residual_rms(expected_x, y, scale, bias, weight, EPS, torch.float32, backend="reference")
    out = residual_rms(x, y, scale, bias, weight, EPS, dtype, backend=backend)
    assert x_intact() and y_intact() and out.dtype == dtype and out.is_contiguous()
    assert_close(out, expected)
    # eager adds the bias in the branch's dtype
    atol = 1e-6 if backend == "triton" or not with_bias else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(x, expected_x, rtol=0, atol=atol)


def test_residual_rms_without_a_branch_is_the_norm(run):
    backend, device, assert_close = run
    x, intact = strided(S, C, dtype=torch.float32, device=device)
    before, weight = x.clone(), torch.rand(C, device=device) + 0.5
    out = residual_rms(x, None, None, None, weight, EPS, torch.float16, backend=backend)
    assert intact() and torch.equal(x, before)
    assert_close(out, torch.nn.functional.rms_norm(before, (C,), weight, EPS))


@FORM
def test_residual_rms_quantised(form, run):
    backend, device, _ = run
    x, y = torch.randn(2, S, C, device=device)
    scale, weight = torch.rand(2, C, device=device) + 0.5
    expected = residual_rms(x.clone(), y, scale, None, weight, EPS, torch.float32, backend="reference")
    out = residual_rms(x, y, scale, None, weight, EPS, torch.bfloat16, form, backend=backend)
    assert_quantised(out, expected, form)


@pytest.mark.parametrize(
    ("H", "D", "dtype"), [(6, 64, torch.float16), (3, 32, torch.float32), (34, 64, torch.bfloat16)]
)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
def test_head_norm_rope_on_a_slice_of_the_fused_product(H, D, dtype, with_bias, run):
    """Two sequences of 5 tokens share one table; the values behind queries and keys stay as they are."""
    backend, device, assert_close = run
    fused = torch.randn(10, H + 2, D).to(device, dtype)
    fused[:, H:] = float("nan")
    x = fused[:, :H]
    bias = torch.randn(H, D).to(device, dtype) if with_bias else None
    angles = torch.randn(5, D // 2, device=device)
    rotations = torch.polar(torch.ones_like(angles), angles)
    expected = x.float().clone()
    head_norm_rope(expected, bias, rotations, EPS, backend="reference")
    head_norm_rope(x, bias, rotations, EPS, backend=backend)
    assert bool(fused[:, H:].isnan().all())
    assert_close(x, expected)


def test_a_head_that_is_no_power_of_two_is_left_to_torch():
    x = torch.randn(2, 2, 48)
    with pytest.raises(BackendUnavailable, match="power of two, got 48"):
        head_norm_rope(x, None, torch.ones(2, 24, dtype=torch.complex64), EPS, backend="triton")
    assert resolve("head_norm_rope", "auto", Case.of(x)).name == "eager"


@DTYPES
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
def test_swiglu_of_halves_of_one_product(dtype, with_bias, run, monkeypatch):
    backend, device, assert_close = run
    both, intact = strided(S, 2 * 50, dtype=dtype, device=device)
    if backend == "triton":
        monkeypatch.setattr("comfyui_fasth3.kernels.swiglu.triton_kernel.BLOCK_F", 32)
    bias = torch.randn(100).to(device, dtype) if with_bias else None
    value, gate = both.chunk(2, dim=1)
    expected = swiglu(value.float(), gate.float(), bias, backend="reference")
    out = swiglu(value, gate, bias, backend=backend)
    assert intact() and out.dtype == dtype
    assert_close(out, expected)


@FORM
def test_swiglu_quantised(form, run):
    backend, device, _ = run
    value, gate = torch.randn(2, S, 100, device=device)
    bias = torch.randn(200, device=device)
    expected = swiglu(value.clone(), gate.clone(), bias, backend="reference")
    assert_quantised(swiglu(value, gate, bias, form, backend=backend), expected, form)


@FORM
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantise_rows(form, dtype, run):
    backend, device, _ = run
    x, intact = strided(S, C, dtype=dtype, device=device)
    assert_quantised(quantise_rows(x, form, backend=backend), x.float(), form)
    assert intact()


@FORM
def test_every_implementation_rounds_alike(form, run):
    """Equal to the reference but where a division lands on the other side of a tie: not one value in a thousand."""
    backend, device, _ = run
    x = torch.randn(S, 300, device=device)
    actual, expected = quantise_rows(x, form, backend=backend), quantise_rows(x, form, backend="reference")
    assert (actual.data.float() != expected.data.float()).float().mean().item() <= 1e-3
    torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-6, atol=0)


@FORM
def test_a_row_of_zeros_stays_zero(form, run):
    backend, device, _ = run
    rows = quantise_rows(torch.zeros(3, C, device=device), form, backend=backend)
    assert bool((rows.dequantise(torch.float32) == 0).all())
