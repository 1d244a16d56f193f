"""Adapters and quantising where the weights live on a GPU, one layer of it at the released size."""

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.apply import Settings, apply_adapter
from comfyui_fasth3.fasth3_core.adapters.weight import AdaptedWeight, Increment
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.quantise import quantise, spec_for
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.model.linear import linear
from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter
from safetensors.torch import save_file

from .tiny import tiny_tensors

HIDDEN, ROWS, RANK, TOKENS = 5376, 21504, 64, 2048


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.mark.parametrize("mode", ["merge", "beside"])
def test_a_model_merged_on_the_device_is_the_one_merged_on_the_cpu(cuda, tmp_path, mode):
    base = tiny_tensors(gates=False)
    save(base, tmp_path / "m.safetensors")
    path = tmp_path / "a.safetensors"
    tensors, metadata = random_adapter(base)
    save_file(tensors, path, metadata=metadata)
    model, _ = apply_adapter(load_model(tmp_path / "m.safetensors", dtype="fp32"), path, Settings(mode=mode))
    held = {}
    for device in (torch.device("cpu"), cuda):
        model.store.materialise(device)
        with model.store.text() as text:
            weights = {**model.store.top(), **text, **{f"0.{n}": w for n, w in model.store.block(0).items()}}
        held[device.type] = {
            name: (w.dequantise(torch.float32) if isinstance(w, AdaptedWeight) else w).cpu()
            for name, w in weights.items()
        }
        model.store.release()
    for name, value in held["cpu"].items():
        torch.testing.assert_close(held["cuda"][name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("form", ["plain", "int8", "fp8"])
def test_increments_at_the_released_size(cuda, form):
    """bf16: the error to fp64 is at most twice that of the plain product with the merged weight."""
    generator = torch.Generator(cuda).manual_seed(0)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=generator, device=cuda) * scale

    plain = normal(ROWS, HIDDEN, scale=HIDDEN**-0.5).bfloat16()
    base = plain if form == "plain" else quantise(plain, spec_for(form, HIDDEN))[0]
    part = ROWS // 3
    increments = tuple(
        Increment(normal(RANK, HIDDEN, scale=HIDDEN**-0.5).bfloat16(), normal(part, RANK, scale=0.05).bfloat16(), 0.7,
                  i * part) for i in range(3)
    )  # fmt: skip
    adapted = AdaptedWeight(base, increments)
    x = normal(TOKENS, HIDDEN).bfloat16()
    merged = adapted.dequantise(torch.float32)
    want = x.double() @ merged.double().T
    lost = (linear(x, merged.bfloat16()).double() - want).norm() / want.norm()
    have = linear(x, adapted).double()
    assert (have - want).norm() / want.norm() <= 2 * lost
    assert (have * 1.01 - want).norm() / want.norm() > 2 * lost
    without = linear(x, base).double()
    assert (without - want).norm() / want.norm() > 10 * lost, "the increments must matter here"


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_quantised_on_the_device_as_on_the_cpu(cuda, form):
    weight = torch.randn(512, HIDDEN).bfloat16()
    here, loss = quantise(weight, spec_for(form, HIDDEN))
    there, same = quantise(weight.to(cuda), spec_for(form, HIDDEN))
    torch.testing.assert_close(there.scale.cpu(), here.scale, rtol=1e-6, atol=0)
    # a rotation in another order of additions may tip a value that lies on a half
    off = (there.data.cpu().float() - here.data.float()).abs()
    assert off.gt(0).float().mean() < 1e-4
    assert same == pytest.approx(loss, rel=1e-4)
