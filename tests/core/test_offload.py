"""Streamed weights: the same bits as resident ones, whatever is streamed from where and whatever went wrong before."""

import errno
import gc
import os
import tempfile

import pytest
import torch
from comfyui_fasth3.fasth3_core.adapters.apply import apply_adapter
from comfyui_fasth3.fasth3_core.adapters.weight import AdaptedWeight
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import ConfigError, Interrupted
from comfyui_fasth3.fasth3_core.sampling.loop import sample
from comfyui_fasth3.fasth3_core.sampling.request import Request
from comfyui_fasth3.fasth3_core.selftest.random_adapter import random_adapter
from comfyui_fasth3.fasth3_core.vsa.attention import attention
from comfyui_fasth3.fasth3_core.weights import masters, slots
from comfyui_fasth3.fasth3_core.weights.placement import RESIDENT, Placement

from .checkpoints import quantise
from .test_adapters import write
from .tiny import TEXT_DIM, tiny_tensors

LAYERS = 7
EVERY = tuple(range(LAYERS))

PLACEMENTS = {
    "all-2-slots": Placement(streamed=EVERY, slots=2),
    "all-3-slots": Placement(streamed=EVERY, slots=3),
    "more-slots-than-blocks": Placement(streamed=(2, 5), slots=4),
    "one-block": Placement(streamed=(3,), slots=2),
    "ends-resident": Placement(streamed=(1, 2, 4, 5), slots=2),
    "mapped": Placement(streamed=EVERY[1:], slots=2, mapped=True),
}


@pytest.fixture(autouse=True)
def _tiny_weights_travel(monkeypatch):
    monkeypatch.setattr(masters, "SMALL", 512)  # norms stay below it, and scales


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tensors = tiny_tensors(num_layers=LAYERS, gates=True, seed=7)
    tensors["blocks.4.mlp.fc1.weight"] = quantise(tensors["blocks.4.mlp.fc1.weight"], 16)  # mixed per layer
    tensors["blocks.2.attn.to_gate_compress.weight"].zero_()
    return save(tensors, tmp_path_factory.mktemp("offload") / "model.safetensors")


@pytest.fixture
def model(path):
    return load_model(path, contract="preview-4")


def run(model, **changes):
    text = torch.randn(1, 6, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    request = Request(text_states=text, latent_frames=2, latent_height=4, latent_width=4, audio_latents=8, seed=5)
    result = sample(model, request, device="cpu", **changes)
    return result.video, result.audio, result.report


def assert_equal(a, b):
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_bits_of_a_resident_run_again_and_again(model, name):
    expected = run(model)
    model.store.place(PLACEMENTS[name])
    for _ in range(3):
        assert_equal(run(model), expected)
    model.store.place(RESIDENT)
    assert_equal(run(model), expected)


def test_report_says_what_was_streamed(model):
    model.store.place(PLACEMENTS["ends-resident"])
    reports = [run(model)[2] for _ in range(2)]
    said = [report.weights for report in reports]
    assert said[0]["policy"] == "stream" and said[0]["resident_blocks"] == 3 and said[0]["slots"] == 2
    assert "4 of 7 blocks streamed from host memory through 2 slots, 3 resident" in reports[0].to_text()
    # loading fills both slots; a run leaves the first block in one for the next run
    assert [w["copies"] for w in said] == [1 + 4 * 4, 4 * 4]
    sizes = model.store.sizes("cpu")
    moved = sizes.host(PLACEMENTS["ends-resident"]) - sizes.text
    assert 0.9 * 4 * moved < said[1]["streamed_bytes"] <= 4 * moved
    assert said[1]["pinned_bytes"] == 0 and said[1]["host_bytes"] == moved + sizes.text


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken, Interrupted, KeyboardInterrupt])
def test_a_failure_inside_a_block_and_a_good_run_after(model, error):
    expected = run(model)
    model.store.place(PLACEMENTS["all-2-slots"])

    def failing(*args, step, layer, **kwargs):
        if (step, layer) == (1, 3):
            raise error
        return attention(*args, step=step, layer=layer, **kwargs)

    for _ in range(2):
        with pytest.raises(error):
            run(model, attend=failing)
        assert_equal(run(model), expected)


def test_a_failed_copy_leaves_no_block_half_another(model, monkeypatch):
    expected = run(model)
    model.store.place(PLACEMENTS["all-2-slots"])
    run(model)
    real, calls = slots._PlainLane.copy, []

    def failing(lane, slot, views, block):
        calls.append(1)
        if len(calls) == 5:
            views[0].fill_(7)
            raise MemoryError
        real(lane, slot, views, block)

    monkeypatch.setattr(slots._PlainLane, "copy", failing)
    with pytest.raises(MemoryError):
        run(model)
    assert_equal(run(model), expected)


def tensors_alive() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["all-2-slots", "mapped"])
def test_twenty_runs_leave_memory_and_files_as_they_were(model, name):
    store = model.store
    store.place(PLACEMENTS[name])
    for _ in range(2):
        run(model)
    handles, alive, files = len(os.listdir("/proc/self/fd")), tensors_alive(), set(os.listdir(tempfile.gettempdir()))
    for i in range(20):
        run(model)
        if i % 5 == 4:
            store.release()
    run(model)
    assert len(os.listdir("/proc/self/fd")) == handles and tensors_alive() == alive
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - files if name.endswith(".weights")]


@pytest.mark.parametrize("after", [0, 5, 60])
@pytest.mark.parametrize("name", ["ends-resident", "mapped"])
def test_an_interrupt_while_loading_leaves_nothing(model, name, after):
    expected = run(model)
    store = model.store
    store.place(PLACEMENTS[name])
    handles, alive, calls = len(os.listdir("/proc/self/fd")), tensors_alive(), []

    def check():
        calls.append(1)
        if len(calls) > after:
            raise Interrupted

    with pytest.raises(Interrupted) as stopped:
        store.materialise("cpu", None, check)
    assert store.location is None and len(os.listdir("/proc/self/fd")) == handles
    del stopped
    assert tensors_alive() == alive
    assert_equal(run(model), expected)


def test_released_weights_come_back_from_host_memory(model):
    store = model.store
    store.place(PLACEMENTS["all-2-slots"])
    run(model)
    store.release()
    read = []
    store.materialise("cpu", lambda done, total: read.append((done, total)))
    assert read[-1] == (store.sizes("cpu").top,) * 2, "only what is outside the blocks"
    store.forget()
    read.clear()
    store.materialise("cpu", lambda done, total: read.append((done, total)))
    sizes = store.sizes("cpu")
    assert read[-1] == (sizes.top + sizes.text + sum(sizes.blocks),) * 2


def test_another_placement_keeps_what_it_can(model):
    expected = run(model)
    store = model.store
    store.place(Placement(streamed=EVERY, slots=2))
    run(model)
    store.place(Placement(streamed=(1, 2), slots=2))
    read = []
    store.materialise("cpu", lambda done, total: read.append(total))
    assert read[-1] == store.sizes("cpu").top
    assert_equal(run(model), expected)
    store.place(Placement(streamed=EVERY[:4], slots=2))  # 1 and 2 are there, the rest is read again
    assert_equal(run(model), expected)


def test_what_refines_the_prompt_is_on_the_device_while_it_does(model):
    store = model.store
    store.place(PLACEMENTS["all-2-slots"])
    store.materialise("cpu")
    with pytest.raises(Broken), store.text() as first:
        kept = dict(first)
        raise Broken
    assert first == {} and {name.split(".")[0] for name in kept} == {"condition_proj", "token_refiner"}
    with store.text() as second:
        assert second.keys() == kept.keys() and not store.top().keys() & kept.keys()
    store.place(RESIDENT)
    store.materialise("cpu")
    with store.text() as resident:
        assert all(torch.equal(resident[name], weight) for name, weight in kept.items())
    with store.text() as again:
        assert again is resident and again
    assert store.host_bytes() == 0


def test_bytes_on_the_device_are_those_of_the_placement(model):
    store = model.store
    for placement in (RESIDENT, *PLACEMENTS.values()):
        sizes = store.sizes("cpu")
        store.place(placement)
        assert store.nbytes("cpu") == sizes.device(placement)
    assert sizes.device(PLACEMENTS["all-2-slots"]) == sizes.top + 2 * max(sizes.blocks)


def test_a_full_disk_is_an_error_before_anything_is_mapped(model, monkeypatch, tmp_path):
    def full(handle, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    model.store.place(Placement(streamed=EVERY, slots=2, mapped=True, folder=tmp_path))
    with pytest.raises(ConfigError, match="No space left on device"):
        model.store.materialise("cpu")
    assert list(tmp_path.iterdir()) == [] and model.store.location is None


def test_no_folder_for_mapped_weights(model, tmp_path):
    model.store.place(Placement(streamed=EVERY, slots=2, mapped=True, folder=tmp_path / "gone"))
    with pytest.raises(ConfigError, match="Point TMPDIR to one"):
        model.store.materialise("cpu")
    assert model.store.location is None


def test_mapped_weights_are_in_the_file(model, tmp_path):
    model.store.place(Placement(streamed=EVERY, slots=2, mapped=True, folder=tmp_path))
    model.store.materialise("cpu")
    assert list(tmp_path.iterdir()) == [], "the file has no name while it is in use"
    with open("/proc/self/maps", encoding="utf-8") as maps:  # the blocks, and what refines the prompt
        assert sum(str(tmp_path) in line for line in maps) == LAYERS + 1
    model.store.forget()
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert not any(str(tmp_path) in line for line in maps)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("pinned", [0, 1 << 40, 40_000], ids=["staged", "pinned", "some-pinned"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_same_on_a_gpu(path, name, pinned):
    model = load_model(path, contract="preview-4", dtype="bf16")
    text = torch.randn(1, 6, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    request = Request(text_states=text, latent_frames=2, latent_height=4, latent_width=4, audio_latents=8, seed=5)
    model.store.place(RESIDENT)
    expected = sample(model, request, device="cuda")
    placement = PLACEMENTS[name]
    model.store.place(Placement(streamed=placement.streamed, slots=placement.slots, mapped=placement.mapped,
                                pinned_bytes=pinned))  # fmt: skip
    for _ in range(3):
        got = sample(model, request, device="cuda")
        assert torch.equal(got.video, expected.video) and torch.equal(got.audio, expected.audio)
    assert got.report.weights["pinned_bytes"] <= pinned
    assert pinned == 0 or placement.mapped or got.report.weights["pinned_bytes"] > 0
    before = torch.cuda.memory_allocated()
    model.store.forget()
    assert torch.cuda.memory_allocated() < before


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


@needs_cuda
@pytest.mark.parametrize("name", ["all-2-slots", "mapped"])
def test_failures_and_runs_in_turn_on_a_gpu(path, name):
    """Twenty of each: the bits stay, and so do file handles and the memory of both sides."""
    model = load_model(path, contract="preview-4", dtype="bf16")
    text = torch.randn(1, 6, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    request = Request(text_states=text, latent_frames=2, latent_height=4, latent_width=4, audio_latents=8, seed=5)
    placement = PLACEMENTS[name]
    model.store.place(Placement(streamed=placement.streamed, slots=2, mapped=placement.mapped, pinned_bytes=1 << 40))
    expected = sample(model, request, device="cuda")
    calls = 0

    def failing():
        nonlocal calls
        calls += 1
        if calls == 2 * LAYERS + 10:  # in the second forward
            raise Broken

    def failure_and_run():
        nonlocal calls
        calls = 0
        with pytest.raises(Broken):
            sample(model, request, device="cuda", check_interrupt=failing)
        got = sample(model, request, device="cuda")
        assert torch.equal(got.video, expected.video) and torch.equal(got.audio, expected.audio)

    for _ in range(3):
        failure_and_run()
    handles, on_device, here = len(os.listdir("/proc/self/fd")), torch.cuda.memory_allocated(), anonymous_bytes()
    for _ in range(20):
        failure_and_run()
    assert len(os.listdir("/proc/self/fd")) == handles and torch.cuda.memory_allocated() == on_device
    assert anonymous_bytes() - here < 4 << 20


def test_weights_made_fp8_as_they_load_stream_alike(path):
    model = load_model(path, contract="preview-4", dtype="fp8")
    expected = run(model)
    for name in ("all-2-slots", "mapped"):
        model.store.place(PLACEMENTS[name])
        assert_equal(run(model), expected)
    assert run(model)[2].weights["streamed_bytes"] > 0


@pytest.mark.parametrize("base", ["float", "int8"])
def test_adapted_weights_stream_alike(tmp_path, base):
    """Merged as they load on float weights, kept as increments beside int8 ones."""
    tensors = tiny_tensors(num_layers=LAYERS, gates=False, seed=3)
    adapter, metadata = random_adapter(tensors, dtype=torch.float32)
    if base == "int8":
        tensors = {n: quantise(t, 16) if ".attn." in n and t.ndim == 2 else t for n, t in tensors.items()}
    opened = load_model(save(tensors, tmp_path / "model.safetensors"))
    model, _ = apply_adapter(opened, write(tmp_path / "adapter.safetensors", adapter, metadata))
    expected = run(model)
    model.store.place(PLACEMENTS["all-2-slots"])
    for _ in range(2):
        assert_equal(run(model), expected)
    kept = model.store.block(3)["attn.qkv_proj.weight"]
    assert isinstance(kept, AdaptedWeight) == (base == "int8")
