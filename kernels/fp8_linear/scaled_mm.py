"""fp8_linear by torch's row-wise scaled product, cuBLASLt's or CUTLASS's.

On an H200 1230 to 1340 TFLOP/s at the video decoder's sizes (7188 and 12579 rows), 1020 to 1210 with exact
accumulation, beside 670 to 710 in fp16.
"""

import torch


def fp8_why_not(device: torch.device) -> str | None:
    """Why a device has no such product."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, got {device.type if torch.version.hip is None else 'ROCm'}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= (8, 9) else f"needs compute capability 8.9 (float8), got {major}.{minor}"


def scaled_mm_why_not(case) -> str | None:
    """Why it cannot give a result of the case's dtype on its device."""
    if (why := fp8_why_not(case.device)) is not None:
        return why
    return None if case.dtype in (torch.bfloat16, torch.float16) else f"gives bf16 and fp16, not {case.dtype}"


def fp8_linear_scaled_mm(x, weight, dtype, out=None):
    return torch._scaled_mm(
        x.data, weight.data.t(), scale_a=x.scale, scale_b=weight.scale.t(), out_dtype=dtype, use_fast_accum=True,
        out=out,
    )
