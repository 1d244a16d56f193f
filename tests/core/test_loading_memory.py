"""Loading takes no more host memory than what it keeps: measured in a process of its own, on a file of 150 MB."""

import json
import os
import subprocess
import sys

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint.save import save
from comfyui_fasth3.fasth3_core.selftest.random_weights import random_transformer

_CHILD = """
import json, sys
import comfyui_fasth3.fasth3_core.weights.masters as masters
from comfyui_fasth3.fasth3_core.checkpoint.load import load_model
from comfyui_fasth3.fasth3_core.weights.placement import Placement

masters.SMALL = 4096

def anonymous():  # pages of this process that are not of a file
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

path, mapped, dtype = sys.argv[1], sys.argv[2] == "mmap", sys.argv[3]
store = load_model(path, contract="preview-4", dtype=dtype).store
before, seen = anonymous(), []
store.place(Placement(streamed=tuple(range(store.config.num_layers)), slots=2, mapped=mapped))
store.materialise("cpu", lambda done, total: seen.append(anonymous()))
sizes = store.sizes("cpu")
print(json.dumps({"kept": anonymous() - before, "peak": max(seen) - before,
                  "device": sizes.device(store.placement), "host": sizes.host(store.placement)}))
"""

_SLACK = 12 << 20
"""A tensor in fp32 beside its form in 8 bits, and what Python takes; a second copy would be 88 MB or more."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("policy", "dtype", "shards"),
    [("stream", "bf16", 0), ("stream", "bf16", 4), ("mmap", "bf16", 4), ("stream", "fp8", 0)],
)
def test_host_memory_while_loading(tmp_path, policy, dtype, shards):
    tensors = random_transformer(
        num_layers=12, hidden_size=512, num_heads=4, head_dim=128, ffn_dim=2048, text_dim=64, freq_dim=32,
        time_embed_hidden_dim=64, time_embed_dim=32, rope_freq_dim=16, gates=True, dtype=torch.bfloat16,
    )
    path = save(tensors, tmp_path / "model", layout="diffusers", shards=shards)
    code = [sys.executable, "-c", _CHILD, str(path), policy, dtype]
    # freed memory goes back at once, as by itself at full size, where every tensor is above the C library's limit
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(code, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    kept = said["device"] + (said["host"] if policy == "stream" else 0)
    assert said["host"] > (50e6 if dtype == "fp8" else 100e6) and said["kept"] <= kept + _SLACK, said
    assert said["peak"] <= kept + _SLACK, said
