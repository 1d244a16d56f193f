"""The resident store: dtypes by policy, one load at a time, and nothing left of a load that fails."""

import gc
import os
import threading

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint import reading
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.checkpoint.quant import QuantizedWeight
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.errors import CheckpointError, Interrupted
from comfyui_fasth3.fasth3_core.weights import policy, zeros
from comfyui_fasth3.fasth3_core.weights.places import Placed
from comfyui_fasth3.fasth3_core.weights.tables import KeptTables

from .checkpoints import FORMS, assert_same, canonical, quantise

CONTRACT = {"full": "auto", "rank": "auto", "curve": "auto", "gates": "preview-4"}


def store_of(tmp_path, form="gates", dtype="auto", **changes):
    path = save(canonical(form) | changes, tmp_path / "model.safetensors")
    return load_model(path, contract=CONTRACT[form], dtype=dtype).store


def resident(store) -> dict:
    blocks = {f"blocks.{i}.{name}": w for i in range(store.config.num_layers) for name, w in store.block(i).items()}
    with store.text() as text:
        return {**store.top(), **text, **blocks}


def everything(store) -> dict:
    """With the AdaLN weights, which are lent to whoever builds tables from them."""
    lent = []
    store.block_tables(object(), lambda weights: lent.append(weights) or ())
    adaln = {f"blocks.{i}.{name}": weight for i, weights in enumerate(lent) for name, weight in weights.items()}
    return resident(store) | adaln


@pytest.mark.parametrize("form", FORMS)
def test_fp32_on_the_cpu_is_the_file_widened(tmp_path, form):
    store = store_of(tmp_path, form)
    store.materialise("cpu")
    assert store.dtype == torch.float32 and store.location == torch.device("cpu")
    tensors = canonical(form)
    weights = everything(store)
    assert weights.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], tensor.float()), name


PINNED = {
    "video_patch_proj.bias", "audio_patch_proj.weight", "time_embedder.proj_in.weight", "time_embedder.proj_out.bias",
    "final_layer.video_out.weight", "final_layer.audio_out.bias", "rope.inv_freq", "adaln_t_table",
}  # fmt: skip


@pytest.mark.parametrize(("form", "adaln"), [("gates", "bfloat16"), ("rank", "float16"), ("curve", "float32")])
def test_bf16_run_pins_what_it_must(tmp_path, form, adaln):
    store = store_of(tmp_path, form, "bf16")
    store.materialise("cpu")
    assert store.dtype == torch.bfloat16
    for name, weight in everything(store).items():
        if name in PINNED:
            assert weight.dtype == torch.float32, name
        elif "adaln_proj" in name or name.startswith("adaln_basis"):
            assert weight.dtype == getattr(torch, adaln), name
        elif name.endswith(("norm.weight", "qkv_proj.weight", "fc1.weight", "condition_proj.bias")):
            assert weight.dtype == torch.bfloat16, name


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_nbytes_is_what_is_held(tmp_path, form, dtype):
    name = "blocks.1.mlp.fc1.weight"
    store = store_of(tmp_path, form, dtype, **{name: quantise(canonical(form)[name], 16)})
    store.materialise("cpu")
    assert isinstance(store.block(1)["mlp.fc1.weight"], QuantizedWeight)
    assert store.nbytes("cpu") == sum(weight.nbytes for weight in resident(store).values())
    assert not any("adaln_proj" in name for name in resident(store) if name.startswith("blocks."))


def test_tables_are_built_once_for_a_schedule_and_the_last_two_are_kept(tmp_path):
    store = store_of(tmp_path)
    store.materialise("cpu")
    built = []

    def build(weights):
        built.append(weights["adaln_proj.linear.bias"][0].item())
        return (weights["adaln_proj.linear.weight"] * 2,)

    first = store.block_tables("four steps", build)
    assert len(first) == store.config.num_layers == len(built)
    assert torch.equal(first[1][0], canonical("gates")["blocks.1.adaln_proj.linear.weight"].float() * 2)
    assert store.block_tables("four steps", build) is first and len(built) == store.config.num_layers
    store.block_tables("eight steps", build)
    count = len(built)
    assert torch.equal(store.block_tables("four steps", build)[1][0], first[1][0]) and len(built) == count
    store.block_tables("nine steps", build)
    store.block_tables("four steps", build)
    assert len(built) == count + 2 * store.config.num_layers, "the third schedule took the place of the first"
    store.release()
    store.materialise("cpu")
    store.block_tables("four steps", build)
    assert len(built) == count + 2 * store.config.num_layers, "tables outlive the weights"


def test_tables_belong_to_a_dtype():
    kept, built = KeptTables(), []

    def get(dtype):
        def build(weights):
            built.append(dtype)
            return (torch.zeros(1, dtype=dtype),)

        return kept.get("steps", build, Placed(torch.device("cpu"), dtype), 1, lambda block: {})[0][0].dtype

    dtypes = [torch.float32, torch.bfloat16]
    assert [get(dtype) for dtype in dtypes * 2] == dtypes * 2 and built == dtypes


def test_an_interrupted_build_leaves_no_tables(tmp_path):
    store = store_of(tmp_path)
    store.materialise("cpu")

    def stop(weights):
        raise Interrupted

    with pytest.raises(Interrupted):
        store.block_tables("steps", stop)
    assert store.block_tables("steps", lambda weights: ()) == ((),) * store.config.num_layers


@pytest.mark.parametrize(
    ("stored", "device", "capability", "run"),
    [
        ("bfloat16", "cuda:0", (8, 0), "bfloat16"),
        ("float32", "cuda:0", (9, 0), "float32"),
        ("float16", "cuda:0", (9, 0), "float32"),  # the residual stream overflows fp16
        ("bfloat16", "cuda:0", (7, 5), "float32"),
        ("bfloat16", "cpu", None, "float32"),
        ("bfloat16", "mps", None, "float32"),
    ],
)
def test_auto_dtype(monkeypatch, stored, device, capability, run):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    decided = policy.run_dtype("auto", getattr(torch, stored), torch.device(device))
    assert decided == getattr(torch, run)
    assert policy.run_dtype("fp16", getattr(torch, stored), torch.device(device)) == torch.float16


def test_stored_dtype_looks_past_pinned_and_quantised_weights(tmp_path):
    tensors = {name: t.bfloat16() for name, t in canonical("full").items()}
    for name in PINNED & tensors.keys():
        tensors[name] = tensors[name].float()
    entries = load_model(save(tensors, tmp_path / "model.safetensors")).store.plan.entries
    assert policy.stored_dtype(entries, "full") == torch.bfloat16
    pinned = {name: entries[name] for name in PINNED & entries.keys()}
    assert policy.stored_dtype(pinned, "full") == torch.bfloat16  # nothing to go by


def test_progress_ends_at_the_total(tmp_path):
    store = store_of(tmp_path)
    seen = []
    store.materialise("cpu", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (store.nbytes("cpu"), store.nbytes("cpu"))


def test_materialise_twice_reads_once(tmp_path):
    store = store_of(tmp_path)
    store.materialise("cpu")
    block = store.block(0)
    store.materialise(torch.device("cpu"), lambda done, total: pytest.fail("read again"))
    assert store.block(0) is block
    store.release()
    assert store.location is None
    with pytest.raises(RuntimeError, match="call materialise"):
        store.block(0)
    store.materialise("cpu")
    assert store.block(0) is not block


def tensors_alive() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


@pytest.mark.parametrize("after", [0, 1, 40])
def test_an_interrupt_leaves_nothing(tmp_path, after):
    store = store_of(tmp_path)
    store.nbytes("cpu")
    handles, alive = len(os.listdir("/proc/self/fd")), tensors_alive()
    calls = []

    def check():
        calls.append(1)
        if len(calls) > after:
            raise Interrupted

    with pytest.raises(Interrupted) as stopped:
        store.materialise("cpu", None, check)
    assert store.location is None and len(calls) == after + 1
    assert len(os.listdir("/proc/self/fd")) == handles
    assert tensors_alive() - alive < 10  # the traceback holds the tensor that was being filled, not those before it
    del stopped
    assert tensors_alive() == alive
    store.materialise("cpu", None, lambda: None)  # and the next one succeeds
    assert len(os.listdir("/proc/self/fd")) == handles


def test_an_interrupt_is_noticed_inside_a_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 1024)
    store = store_of(tmp_path)
    calls = []
    store.materialise("cpu", None, lambda: calls.append(1))
    assert len(calls) > store.nbytes("cpu") / 4 / 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_through_staging_to_a_gpu(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(reading, "PIECE", 1024)  # many pieces in flight, most of them inside a row
    quantised = quantise(canonical("gates")["blocks.1.mlp.fc1.weight"], 16)
    store = store_of(tmp_path, "gates", dtype, **{"blocks.1.mlp.fc1.weight": quantised})
    store.materialise("cpu")
    expected = everything(store)
    store.materialise("cuda")
    assert store.location == torch.device("cuda", torch.cuda.current_device())
    moved = {name: w.to("cpu") for name, w in everything(store).items()}
    assert_same(moved, expected)


def test_a_changed_file_is_noticed(tmp_path):
    store = store_of(tmp_path)
    save(canonical("full"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="changed on disk"):
        store.materialise("cpu")
    assert store.location is None


def test_weights_outlive_the_inference_mode_they_were_asked_in(tmp_path):
    store = store_of(tmp_path, "full")
    with torch.inference_mode():
        store.materialise("cpu")
    assert not any(weight.is_inference() for weight in everything(store).values())


def test_two_threads_load_once(tmp_path):
    store = store_of(tmp_path, "full")
    total, done = store.nbytes("cpu"), []
    threads = [
        threading.Thread(target=store.materialise, args=("cpu", lambda count, total: done.append(count)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.count(total) == 1 and store.location is not None


def test_gates(tmp_path, monkeypatch):
    monkeypatch.setattr(zeros, "_PROBE_ROWS", 3)  # the last row is not in the first look
    assert store_of(tmp_path / "a", "full").gates_all_zero() is None
    assert store_of(tmp_path / "b", "gates").gates_all_zero() is False
    zero = {name: t * 0 for name, t in canonical("gates").items() if "gate_compress" in name}
    path = save(canonical("gates") | zero, tmp_path / "c.safetensors")
    assert load_model(path).store.gates_all_zero() is True
    last = zero["blocks.2.attn.to_gate_compress.weight"].clone()
    last[-1, -1] = 1e-3
    path = save(canonical("gates") | zero | {"blocks.2.attn.to_gate_compress.weight": last}, tmp_path / "d.safetensors")
    assert load_model(path, contract="preview-4").store.gates_all_zero() is False


def test_quantised_gates(tmp_path):
    gates = {name: t for name, t in canonical("gates").items() if "gate_compress" in name}
    zero = {name: quantise(t * 0, 16) for name, t in gates.items()}
    path = save(canonical("gates") | zero, tmp_path / "a.safetensors")
    assert load_model(path).contract.name == "compact"
    path = save(canonical("gates") | {name: quantise(t, 16) for name, t in gates.items()}, tmp_path / "b.safetensors")
    assert load_model(path, contract="v2-8").store.gates_all_zero() is False
