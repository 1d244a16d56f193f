"""Mirrors kernels/precision.py: fp32 is fp32 inside, and the caller's settings are back outside."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comfyui_fasth3.kernels.precision import exact_fp32, full_precision_matmul

CPU = torch.device("cpu")


def flags():
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()


@pytest.fixture(autouse=True)
def _restore():
    conv, _, matmul = flags()
    yield
    torch.backends.cudnn.allow_tf32 = conv
    torch.set_float32_matmul_precision(matmul)


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
@pytest.mark.parametrize("fails", [True, False])
def test_flags_come_back(conv, matmul, fails):
    torch.backends.cudnn.allow_tf32 = conv
    torch.set_float32_matmul_precision(matmul)
    before = flags()
    try:
        with exact_fp32(CPU):
            assert flags() == (False, False, "highest")
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert flags() == before


@pytest.mark.parametrize("name", ["cudnn.conv", "cuda.matmul"])
@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch has no per-operation precision flags")
def test_per_operation_flags_come_back(name):
    """Once these are written, torch refuses to read the older flags."""
    backend, operation = name.split(".")
    owner = getattr(getattr(torch.backends, backend), operation)
    before = owner.fp32_precision
    other = "ieee" if name == "cudnn.conv" else "tf32"
    try:
        owner.fp32_precision = other
        with exact_fp32(CPU):
            assert owner.fp32_precision == "ieee"
        assert owner.fp32_precision == other
    finally:
        owner.fp32_precision = before


def test_autocast_is_off_inside():
    a = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with exact_fp32(CPU):
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16


MATMUL = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
new_settings = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has one setting"
)


@pytest.fixture
def _restored():
    before = [m.fp32_precision for m in MATMUL]
    yield
    for m, value in zip(MATMUL, before, strict=True):
        m.fp32_precision = value


@new_settings
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_matmul_is_full_precision_inside_and_as_before_after(setting):
    for m in MATMUL:
        m.fp32_precision = setting
    with full_precision_matmul():
        assert [m.fp32_precision for m in MATMUL] == ["ieee", "ieee"]
        with full_precision_matmul():
            pass
        assert [m.fp32_precision for m in MATMUL] == ["ieee", "ieee"]
    assert [m.fp32_precision for m in MATMUL] == [setting, setting]


@new_settings
@pytest.mark.usefixtures("_restored")
def test_matmul_settings_come_back_after_an_error():
    torch.set_float32_matmul_precision("medium")
    before = [m.fp32_precision for m in MATMUL]
    with pytest.raises(RuntimeError, match="stop"), full_precision_matmul():
        raise RuntimeError("stop")
    assert [m.fp32_precision for m in MATMUL] == before
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")


EVERY = ("cuda.matmul", "mkldnn.matmul", "cudnn.conv", "mkldnn.conv")


def precisions() -> list[str]:
    backends = (name.split(".") for name in EVERY)
    return [getattr(getattr(torch.backends, backend), operation).fp32_precision for backend, operation in backends]


@new_settings
@pytest.mark.parametrize(
    "lower",
    ["torch.backends.fp32_precision = 'tf32'", "torch.backends.cudnn.fp32_precision = 'tf32'",
     "torch.backends.mkldnn.fp32_precision = 'bf16'", "torch.backends.cuda.matmul.allow_tf32 = True",
     "torch.set_float32_matmul_precision('medium')"],
)  # fmt: skip
def test_inherited_settings_are_full_precision_inside_and_as_before_after(lower):
    """In a process of its own: what was inherited cannot be told from what was set, and so not be put back here."""
    code = f"""
import runpy, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import conftest
t = runpy.run_path({__file__!r})
torch = t["torch"]
{lower}
before = t["precisions"]()
with t["exact_fp32"](t["CPU"]):
    assert set(t["precisions"]()) <= {{"ieee", "none"}}, t["precisions"]()
assert t["precisions"]() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_thread_leaves_while_another_is_inside():
    torch.set_float32_matmul_precision("high")
    first, second = full_precision_matmul(), full_precision_matmul()
    first.__enter__()
    second.__enter__()  # as in another thread: the settings are of the process
    first.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "highest"
    second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "high"
