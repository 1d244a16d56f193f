"""Fixtures of the lanes that need a real ComfyUI, its real frontend, or both. Each skips and says what is missing.

COMFY_APP        a ComfyUI checkout (0.33 or newer)
COMFY_PYTHON     a Python with its requirements; default: this one
PLAYWRIGHT_CORE  the node package playwright-core; default: wherever `node` finds it
CHROMIUM         default: /usr/bin/chromium
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import graphs, shipped
from .browser import Browser, why_no_browser
from .derived import derive
from .server import ComfyServer, make_base
from .worker import Worker

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def comfy_app() -> Path:
    if not os.environ.get("COMFY_APP"):
        pytest.skip("needs a ComfyUI checkout in COMFY_APP")
    return Path(os.environ["COMFY_APP"]).resolve()


@pytest.fixture(scope="session")
def comfy_python(comfy_app) -> str:
    python = os.environ.get("COMFY_PYTHON", sys.executable)
    check = subprocess.run([python, "-c", "import torchsde, transformers"], capture_output=True, text=True)
    if check.returncode:
        pytest.skip(f"COMFY_PYTHON ({python}) lacks ComfyUI's requirements: {check.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture(scope="session")
def models(comfy_app, comfy_python, tmp_path_factory) -> Path:
    """Tiny stock-format models, written once."""
    root = tmp_path_factory.mktemp("models")
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([comfy_python, str(HERE / "child" / "write_models.py"), str(root)], check=True, env=env)
    derive(root)
    return root


@pytest.fixture(scope="session")
def server(comfy_app, comfy_python, models, tmp_path_factory):
    with ComfyServer(comfy_app, comfy_python, make_base(tmp_path_factory.mktemp("server"), models)) as running:
        yield running


@pytest.fixture(scope="session")
def stocked(server, models):
    """The server with everything that the shipped workflows load: model files, pictures, and an encoded prompt."""
    prompts = [shipped.prompt_of(path) for path in shipped.api_files()]
    shipped.offer(prompts, models, server.base / "input")
    encode = {
        **graphs.text_encoder(),
        "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["clip", 0], "text": graphs.PROMPT}},
        "save": {"class_type": "FastH3SavePromptEmbeds", "inputs": {
            "positive": ["text", 0], "filename_prefix": "fasth3_prompts/prompt"}},
    }
    server.run(encode)
    saved = next((server.base / "output" / "fasth3_prompts").glob("*.safetensors"))
    for name in shipped.prompt_files(prompts):
        shutil.copy(saved, server.base / "input" / name)
    return server


@pytest.fixture(scope="session")
def worker(comfy_app, comfy_python, models, tmp_path_factory):
    with Worker(comfy_app, comfy_python, make_base(tmp_path_factory.mktemp("worker"), models)) as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Browser:
    reason = why_no_browser()
    if reason:
        pytest.skip(reason)
    return Browser()
