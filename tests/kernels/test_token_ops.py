"""The token-wise ops: each eager form against its fp32 reference, odd shapes, with tolerances that bite."""

import pytest
import torch
from comfyui_fasth3.kernels.gated_residual import gated_residual, gated_residual_reference
from comfyui_fasth3.kernels.qk_norm_rope import eager as qk_eager
from comfyui_fasth3.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from comfyui_fasth3.kernels.rms_modulate import rms_modulate, rms_modulate_reference
from comfyui_fasth3.kernels.swiglu import swiglu, swiglu_reference

SEGMENTS = ((0, 5, 1), (5, 6, 0), (6, 37, 2))
# relative L2: a few roundings, each at most half the dtype's epsilon (6e-8, 3.9e-3, 4.9e-4)
TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = list(TOLERANCE)


def assert_close(out, reference):
    """Within the dtype's tolerance of the fp32 reference; and 1% more is not."""

    def error(x):
        return ((x - reference.float()).norm() / reference.float().norm()).item()

    tolerance = TOLERANCE[out.dtype]
    assert error(out.float()) <= tolerance
    assert error(out.float() * 1.01) > tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_modulate(dtype):
    x, weight = torch.randn(37, 80, dtype=dtype), torch.rand(80, dtype=dtype) + 0.5
    scale, shift = torch.randn(2, 3, 80, dtype=dtype)
    before = x.clone()
    out = rms_modulate(x, weight, scale, shift, SEGMENTS, 1e-5)
    assert torch.equal(x, before) and out.dtype == dtype
    assert_close(out, rms_modulate_reference(x.float(), weight, scale, shift, SEGMENTS, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_residual(dtype):
    x, y, gate = (torch.randn(*shape, dtype=dtype) for shape in ((37, 80), (37, 80), (3, 80)))
    reference = gated_residual_reference(x.float(), y.float(), gate, SEGMENTS)
    out = gated_residual(x, y, gate, SEGMENTS)
    assert out is x
    assert_close(out, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [10, 8192])
def test_qk_norm_rope_on_a_strided_view(dtype, rows, monkeypatch):
    monkeypatch.setattr(qk_eager, "ROWS", rows)
    S, H, D, R = 37, 3, 32, 12
    fused = torch.randn(S, 3, H, D).to(dtype)
    q, untouched = fused[:, 0], fused[:, 1:].clone()
    weight, angles = torch.rand(D).to(dtype) + 0.5, torch.randn(S, R) * 10
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    reference = qk_norm_rope_reference(q.float(), weight, cos, sin, 1e-5)
    out = qk_norm_rope(q, weight, cos, sin, 1e-5)
    assert out.data_ptr() == fused.data_ptr()
    assert torch.equal(fused[:, 1:], untouched)
    assert_close(out, reference)


def test_rotation_keeps_the_pass_through_channels():
    x = torch.randn(5, 2, 16)
    zero = torch.zeros(5, 6)
    out = qk_norm_rope(x.clone(), torch.ones(16), zero + 1, zero, 1e-5)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (16,), eps=1e-5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_first", [True, False])
def test_swiglu(dtype, gate_first):
    x = torch.randn(37, 2 * 50, dtype=dtype)
    before = x.clone()
    out = swiglu(x, gate_first=gate_first)
    assert torch.equal(x, before)
    assert_close(out, swiglu_reference(x.float(), gate_first))


def test_swiglu_halves_are_not_the_same():
    x = torch.randn(3, 8)
    assert not torch.allclose(swiglu(x, gate_first=True), swiglu(x, gate_first=False))
    assert torch.equal(swiglu(x, gate_first=True), swiglu(torch.cat(x.chunk(2, -1)[::-1], -1), gate_first=False))
