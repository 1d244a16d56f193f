"""Mirrors nodes/_comfy_memory.py and _host_comfy.py, in a process with a real ComfyUI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfy


@pytest.mark.skipif(not os.environ.get("COMFY_APP"), reason="needs a ComfyUI checkout in COMFY_APP")
def test_weights_in_comfyuis_list_of_loaded_models():
    python = os.environ.get("COMFY_PYTHON", sys.executable)
    child = Path(__file__).with_name("comfy_memory_child.py")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, str(child)], capture_output=True, text=True, timeout=300, env=env)
    assert done.stdout.strip().endswith("ok"), done.stdout + done.stderr
