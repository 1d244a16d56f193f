"""The smallest Triton kernel: does this machine compile and launch at all?"""

import torch
import triton
import triton.language as tl


@triton.jit
def _probe_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, (tl.load(x_ptr).to(tl.float32) + 1.0).to(out_ptr.dtype.element_ty))


def probe(device: torch.device, dtype: torch.dtype) -> None:
    """Raises what the toolchain raises, or RuntimeError if the launch gives a wrong value."""
    x = torch.ones(1, dtype=dtype, device=device)
    out = torch.zeros_like(x)
    with torch.cuda.device_of(x):
        _probe_kernel[(1,)](x, out, num_warps=1)
    if out.item() != 2.0:
        raise RuntimeError(f"a probe kernel gave {out.item()}, not 2")
