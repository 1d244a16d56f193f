"""Triton's interpreter on the CPU has two faults with bf16, which are mended here: products multiply bit patterns as
integers, and conversions from fp32 cut instead of rounding to nearest.
"""

import numpy as np
import pytest
from comfyui_fasth3.kernels.device import INTERPRET


@pytest.fixture(autouse=True)
def _bf16_in_the_interpreter(monkeypatch):
    if not INTERPRET:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self, a, b, *rest):
        wide = (cast(self, x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return dot(self, *wide, *rest)

    def cast_impl(self, x, dtype):
        if x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            bits = x.data.view(np.uint32)
            rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
            x = type(x)(np.where(np.isnan(x.data), bits, rounded).astype(np.uint32).view(np.float32), tl.float32)
        return cast(self, x, dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
