"""Mirrors kernels/block_sparse_attention/hopper_*.py: the packing anywhere, the kernel on a Hopper GPU."""

import os
import subprocess
import sys

import pytest
import torch
from comfyui_fasth3.kernels.block_sparse_attention import block_sparse_attention_eager
from comfyui_fasth3.kernels.device import INTERPRET, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .vsa_cases import fused, offsets_of, random_lists, relative_error, token_mask_attention

triton = pytest.importorskip("triton", reason="triton is not installed")

STEP, GRANULE, PAIR, FOUR = 64, 8, 9, 10
TILES = [64, 6, 64, 30, 64, 32, 64, 16, 8, 64, 2, 24, 63, 1, 9, 27, 64, 48]
"""Every remainder by 8 that a grid can leave, beside full tiles; the first four are the prefix."""
PREFIX = 4
EDGES = [64, 16, 17, 32, 33, 15, 31, 8, 48]
"""Sizes around those at which the kernel takes another path."""


# ---- packing


@st.composite
def tiles_and_lists(draw):
    """Tile sizes and one or two heads of lists over them, from empty to all tiles."""
    sizes = draw(st.lists(st.one_of(st.just(64), st.integers(1, 64)), min_size=1, max_size=24))
    heads = draw(st.integers(1, 2))
    tiles = st.lists(st.integers(0, len(sizes) - 1), unique=True).map(sorted)
    return sizes, [[draw(tiles) for _ in range(min(3, len(sizes)))] for _ in range(heads)]


def as_tensors(lists):
    most = max(1, max(len(row) for head in lists for row in head))
    index = torch.tensor([[row + [-1] * (most - len(row)) for row in head] for head in lists], dtype=torch.int32)
    return index, torch.tensor([[len(row) for row in head] for head in lists], dtype=torch.int32)


def unpack(packed, item):
    """Masked steps, granules (row, kind) and the rows of each step of one list, read back as the kernel does."""
    masked, ragged, total = packed.steps[item].tolist()
    granules = [(code >> 4, code & 15) for code in packed.granules[item, : GRANULE * ragged].tolist()]
    steps = []
    for j in range(ragged):
        step = granules[GRANULE * j : GRANULE * (j + 1)]
        steps.append([row + r for row, kind in step for r in range(min(kind, GRANULE))])
    for first in packed.full[item, : total - ragged].tolist():
        steps.append(list(range(first, first + STEP)))
    return masked, granules, steps


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=tiles_and_lists())
def test_packing(case, triton_device):
    """Each listed token once, nothing else, in as few steps as can be, and a mask only where one is needed."""
    from comfyui_fasth3.kernels.block_sparse_attention.steps import pack_lists

    sizes, lists = case
    offsets, (index, count) = offsets_of(sizes), as_tensors(lists)
    total = sum(sizes)
    packed = pack_lists(offsets.to(triton_device), index.to(triton_device), count.to(triton_device), total)
    for item, tiles in enumerate(row for head in lists for row in head):
        masked, granules, steps = unpack(packed, item)
        expected = [t for n in tiles for t in range(int(offsets[n]), int(offsets[n + 1]))]
        assert sorted(t for step in steps for t in step) == expected
        ragged_sizes = [sizes[n] for n in tiles if sizes[n] < STEP]
        used = sum(-(-size // GRANULE) for size in ragged_sizes)
        fewest = sum(sizes[n] == STEP for n in tiles) + -(-used // GRANULE)
        assert len(steps) == max(1, fewest)
        assert all(len(step) == STEP for step in steps[masked:])
        assert all(step for step in steps) or not tiles
        short = sum(size % GRANULE > 0 for size in ragged_sizes)
        assert masked <= -(-(short + GRANULE - 1) // GRANULE) if tiles else masked == 1
        empty = [row for row, kind in granules if kind == 0]
        assert empty == [total] * len(empty) and len(empty) < GRANULE + (not tiles)
        for place, (row, kind) in enumerate(granules):
            length = {PAIR: 2, FOUR: 4}.get(kind, 1)
            assert place % length == 0, "a piece is aligned, so that one copy can write it"
            assert granules[place + 1 : place + length] == [(row + GRANULE * i, GRANULE) for i in range(1, length)]


@pytest.mark.skipif(INTERPRET or torch.cuda.is_available(), reason="test_packing ran here")
def test_packing_in_the_interpreter():
    """Where Triton has no GPU, the same test in a process of its own: the interpreter is chosen at import."""
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-k", "test_packing", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


# ---- the kernel


@pytest.fixture(scope="module")
def hopper():
    """The kernel, where it can run."""
    from comfyui_fasth3.kernels.block_sparse_attention import gluon_why_not

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (why := gluon_why_not(Case(device=device, dtype=torch.bfloat16))) is not None:
        pytest.skip(f"hopper: {why}")
    from comfyui_fasth3.kernels.block_sparse_attention import hopper_kernel

    return hopper_kernel


def make(dtype=torch.bfloat16, tiles=TILES, prefix=PREFIX, heads=3):
    """q, k, v views of one projection on the GPU; tile lists from empty to all."""
    offsets = offsets_of(tiles)
    q, k, v = fused(int(offsets[-1]), heads, 128, dtype)
    index, count = random_lists(heads, len(tiles) - prefix, len(tiles), len(tiles))
    count[0, 0], count[-1, -1] = 0, len(tiles)
    index[-1, -1] = torch.arange(len(tiles), dtype=torch.int32)
    index[0, 0] = -1
    return [x.cuda() for x in (q[offsets[prefix] :], k, v, offsets, index, count)]


def assert_as_exact_as_torch(out, args):
    """At most twice what torch's own attention loses in this dtype; one per cent more must fail."""
    expected = token_mask_attention(*(x.cpu() for x in args))
    plain = relative_error(block_sparse_attention_eager(*args).cpu(), expected)
    assert relative_error(out.cpu(), expected) <= 2 * plain
    assert relative_error(out.cpu() * 1.01, expected) > 2 * plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", [TILES, [64] * 6, [7, 5, 1, 2, 3, 6, 4], [64, 64, 64, 64, 9], EDGES], ids=len)
def test_matches_the_definition(hopper, tiles, dtype):
    args = make(dtype, tiles)
    assert_as_exact_as_torch(hopper.block_sparse_attention_hopper(*args), args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("first", "last"), [(0.01, 12), (12, 0.01), (0.5, 2)])
def test_logits_that_rise_or_fall_along_a_list(hopper, dtype, first, last):
    """By far more than the running maximum may be passed, and by less."""
    q, k, v, offsets, index, count = make(dtype, [64] * 24 + [30, 16])
    k = k * torch.linspace(first, last, len(k), dtype=dtype, device="cuda")[:, None, None]
    args = q, k, v, offsets, index, count
    assert_as_exact_as_torch(hopper.block_sparse_attention_hopper(*args), args)


def test_empty_lists_give_zeros(hopper):
    q, k, v, offsets, index, count = make()
    out = hopper.block_sparse_attention_hopper(q, k, v, offsets, index.fill_(-1), count.zero_())
    assert torch.equal(out, torch.zeros_like(out))


def test_nothing_outside_a_list_is_read_into_it(hopper):
    """With all else NaN, queries of other tiles included, a tile's result stays what it was, bit for bit."""
    q, k, v, offsets, index, count = make()
    out = hopper.block_sparse_attention_hopper(q, k, v, offsets, index, count)
    tile = torch.repeat_interleave(offsets.diff().long())
    nan = float("nan")
    for h in range(count.shape[0]):
        for i in range(count.shape[1]):
            own = tile[-len(q) :] == PREFIX + i
            unlisted = ~torch.isin(tile, index[h, i, : count[h, i]])
            poisoned = (
                q.masked_fill(~own[:, None, None], nan),
                *(x.masked_fill(unlisted[:, None, None], nan) for x in (k, v)),
            )
            again = hopper.block_sparse_attention_hopper(*poisoned, offsets, index, count)
            assert torch.equal(again[own, h], out[own, h]), f"head {h}, tile {i}"


def test_strides(hopper):
    """Heads outside tokens, a copy for what the copy engine cannot address, and any output."""
    q, k, v, offsets, index, count = make()
    expected = hopper.block_sparse_attention_hopper(q, k, v, offsets, index, count)
    head_major = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    odd = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (q, k, v)]
    for inputs in (head_major, odd):
        assert torch.equal(hopper.block_sparse_attention_hopper(*inputs, offsets, index, count), expected)
    out = torch.full((*q.shape[:2], 2 * 128 + 1), float("nan"), dtype=q.dtype, device="cuda")
    written = hopper.block_sparse_attention_hopper(q, k, v, offsets, index, count, out=out[..., 1::2])
    assert torch.equal(written, expected) and out[..., ::2].isnan().all()


def test_over_its_queries(hopper):
    """A program reads rows of the next tile behind a short one, which their own may have overwritten."""
    q, *rest = make(heads=41)
    expected = hopper.block_sparse_attention_hopper(q, *rest)
    assert hopper.block_sparse_attention_hopper(q, *rest, out=q) is q
    assert torch.equal(q, expected)


def test_groups_of_heads(hopper, monkeypatch):
    args = make()
    expected = hopper.block_sparse_attention_hopper(*args)
    monkeypatch.setattr(hopper, "_TABLE_BYTES", 1)
    assert torch.equal(hopper.block_sparse_attention_hopper(*args), expected)


def test_more_lists_than_fit_at_once(hopper):
    args = make(tiles=[64, 30] * 30, prefix=2, heads=41)
    assert_as_exact_as_torch(hopper.block_sparse_attention_hopper(*args), args)


@pytest.mark.skipif(INTERPRET, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_compiles_for_hopper(element):
    """To machine code, on a machine without a GPU, and two programs fit into a multiprocessor."""
    hopper_kernel = pytest.importorskip("comfyui_fasth3.kernels.block_sparse_attention.hopper_kernel")
    kernel = hopper_kernel.attention_kernel
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = {"tiles": [64, 128], "fours": [32, 64], "pairs": [16, 64], "ones": [8, 64]}
    constants = {"STAGES": hopper_kernel.STAGES, "COPY_REGISTERS": hopper_kernel.COPY_REGISTERS, "stride_od": 1}

    def kind(name):
        if name in constants:
            return "constexpr"
        if (box := boxes.get(name.partition("_")[2])) is not None:
            return f"tensordesc<{element}{box},{layout!r}>"
        if name == "out_ptr":
            return f"*{element}"
        return "*i32" if name.endswith("_ptr") else "fp32" if name == "scale" else "i32"

    source = GluonASTSource(kernel, {name: kind(name) for name in kernel.arg_names}, constants)
    options = {"num_warps": 4, "maxnreg": hopper_kernel.MAX_REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "cubin" in compiled.asm
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024  # each is charged a kilobyte more
