"""block_sparse_attention on data-center Blackwell, by the kernel that fastvideo-kernel builds for sm_100a.

Opt-in: the backend `sm100a` names it, and with FASTVIDEO_VSA_SM100A=1 "auto" tries it before all others. This file says
why it cannot run and translates to its calling convention: every tile becomes a block of 64 slots and a number of valid
ones, in tensors [1, H, slots, D]. Prefix tiles have no queries here; their query blocks get empty lists. The kernel
takes query blocks in pairs, so an odd number of tiles gets an empty partner block, which no list names: whether the
route is open does not depend on the length of a prompt.

Not measured: no such GPU was at hand. Tests run the translation on a stand-in in torch; on a GPU a small case has to
come out right before the first run.

S tokens, M video tokens, H heads, D head channels, N tiles, V video tiles, K listed tiles, B blocks (N or N + 1).
"""

import importlib
from functools import cache

import torch
import torch.nn.functional as F

from ..device import Case, first_line
from .reference import block_sparse_attention_reference

MODULE = "fastvideo_kernel.block_sparse_attn_sm100a"
INDEX_BUILDER = "fastvideo_kernel.triton_kernels.index"
BLOCK, HEAD_DIM = 64, 128

_CAPABILITIES = ((10, 0), (10, 3))
"""That some build runs on. A build's own is_supported knows which: 10.3 is refused by those up to 0.3.5."""

_BYTES = 1 << 30
"""Of padded tensors at a time, unless the caller says otherwise; heads beyond it wait their turn."""

_SELF_CHECK_ERROR = 5e-3
"""bf16 inputs and probabilities lose 2.3e-3 in the Hopper kernel."""


def sm100a_why_not(case: Case) -> str | None:
    """Every reason why the kernel cannot take this case, in the order asked: it can be imported, no gradient flows, it
    supports the case, its index builder can be imported. The last question, asked once per device, runs a small case.
    """
    absent = _import_failure(MODULE, "is_supported", "block_sparse_attn_sm100a")
    unsupported = _misfits(case) or ([] if absent else _refusal(case))
    reasons = [
        *absent,
        *(["forward only, but the input requires grad"] if case.grad else []),
        *unsupported,
        # our lists need no building, but a package without it is not the one whose calling convention this is
        *_import_failure(INDEX_BUILDER, "map_to_index"),
    ]
    return "; ".join(reasons) if reasons else _self_check_failure(case.device)


def capability(device: torch.device) -> tuple[int, int] | None:
    """None where there is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def _import_failure(module: str, *names: str) -> list[str]:
    try:
        found = importlib.import_module(module)
        for name in names:
            getattr(found, name)
    except Exception as error:  # an extension built for another torch, CUDA or Python raises types of its own
        return [f"cannot import {module} of the package fastvideo-kernel: {first_line(error)}"]
    return []


def _misfits(case: Case) -> list[str]:
    found = []
    if (generation := capability(case.device)) not in _CAPABILITIES:
        got = case.device.type if generation is None else "{}.{}".format(*generation)
        found.append(f"needs an NVIDIA GPU of compute capability 10.0 or 10.3, got {got}")
    if case.dtype != torch.bfloat16:
        found.append(f"needs bf16, got {case.dtype}")
    if case.head_dim != HEAD_DIM:
        found.append(f"needs a head dim of {HEAD_DIM}, got {case.head_dim}")
    if case.tile_size > BLOCK:
        found.append(f"needs tiles of at most {BLOCK} tokens, got {case.tile_size}")
    return found


def _refusal(case: Case) -> list[str]:
    """is_supported reads device, dtype, strides and shapes alone, so two blocks answer for every call of the run."""
    q = torch.empty(1, 1, 2 * BLOCK, HEAD_DIM, dtype=case.dtype, device=case.device)
    sizes = torch.empty(2, dtype=torch.int32, device=case.device)
    if importlib.import_module(MODULE).is_supported(q, sizes):
        return []
    generation = "{}.{}".format(*capability(case.device))
    return [f"its is_supported says no: not built for blocks of {BLOCK} tokens on compute capability {generation}"]


@cache
def _self_check_failure(device: torch.device) -> str | None:
    try:
        self_check(device)
    except Exception as error:  # the extension's, the driver's, a wrong result
        return f"cannot run on {device}: {first_line(error)}"
    return None


def self_check(device: torch.device) -> None:
    """Run ragged tiles, an odd number of them, and lists of unequal length, one of them empty.

    Raises:
        RuntimeError: the result is wrong.
    """
    offsets = torch.tensor([0, 64, 69, 133, 166, 230], dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(230, 3, 2, HEAD_DIM, dtype=torch.float32, device=device, generator=generator)
    q, k, v = qkv.to(torch.bfloat16).unbind(1)
    rows = [[0, 1, 2, 3, 4], [-1, -1, -1, -1, -1], [1, 3, 4, -1, -1]]
    index = torch.tensor([rows, rows[::-1]], dtype=torch.int32, device=device)
    case = (offsets, index, (index >= 0).sum(-1, dtype=torch.int32))
    out = block_sparse_attention_sm100a(q[69:], k, v, *case).float()
    expected = block_sparse_attention_reference(q[69:].float(), k.float(), v.float(), *case)
    error = ((out - expected).norm() / expected.norm()).item()
    if not error < _SELF_CHECK_ERROR:
        raise RuntimeError(f"relative error {error:.1e} on a small case, expected below {_SELF_CHECK_ERROR}")
    if out[expected == 0].any():
        raise RuntimeError("an empty list did not give zeros on a small case")


def block_sparse_attention_sm100a(q_MHD, k_SHD, v_SHD, offsets_N1, index_HVK, count_HV, *, out=None, byte_budget=None):
    M, H, D = q_MHD.shape
    attend = importlib.import_module(MODULE).block_sparse_attn_sm100a
    out = torch.empty(q_MHD.shape, dtype=q_MHD.dtype, device=q_MHD.device) if out is None else out
    slots_S, sizes_B = _layout(offsets_N1, k_SHD.shape[0])
    slots_M, B = slots_S[-M:], len(sizes_B)
    bytes_per_head = 4 * B * BLOCK * D * q_MHD.element_size()
    group = max(1, (byte_budget or _BYTES) // bytes_per_head)
    with torch.cuda.device_of(q_MHD):
        for first in range(0, H, group):
            heads = slice(first, first + group)
            q_hTD, k_hTD, v_hTD = (
                _padded(x[:, heads], slots, B * BLOCK)
                for x, slots in ((q_MHD, slots_M), (k_SHD, slots_S), (v_SHD, slots_S))
            )
            index_hBK, count_hB = _lists(index_HVK[heads], count_HV[heads], len(offsets_N1) - 1, B)
            result, _ = attend(
                q_hTD[None], k_hTD[None], v_hTD[None], index_hBK[None], count_hB[None], sizes_B, need_lse=False
            )
            out[:, heads] = result[0].index_select(1, slots_M).transpose(0, 1)
    return out


def _layout(offsets_N1: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot of every token, [S] int64, and valid slots of every block, [B] int32, B even. Does not wait for the GPU."""
    sizes_N = offsets_N1.diff()
    tile_S = torch.repeat_interleave(sizes_N, output_size=num_tokens)
    within_S = torch.arange(num_tokens, dtype=torch.int64, device=offsets_N1.device) - offsets_N1[tile_S]
    return tile_S * BLOCK + within_S, F.pad(sizes_N, (0, len(sizes_N) % 2))


def _padded(x_ThD: torch.Tensor, slots_T: torch.Tensor, num_slots: int) -> torch.Tensor:
    """[h, num_slots, D]. Slots without a token are zeros: the kernel masks their logits and still multiplies them."""
    _, h, D = x_ThD.shape
    return x_ThD.new_zeros(h, num_slots, D).index_copy_(1, slots_T, x_ThD.transpose(0, 1))


def _lists(index_hVK: torch.Tensor, count_hV: torch.Tensor, N: int, B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[h, B, K] and [h, B] int32: a list for every block, empty where no video tile is."""
    before, after = N - count_hV.shape[1], B - N
    return F.pad(index_hVK, (0, 0, before, after), value=-1), F.pad(count_hV, (before, after))
