"""A real ComfyUI server in a process of its own, with this repository as a custom node pack."""

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
import wave
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

from .events import CLIENT

FLAGS = (
    "--cpu", "--disable-api-nodes", "--disable-auto-launch", "--use-pytorch-cross-attention",
    "--database-url", "sqlite:///:memory:",
)
START_SECONDS = 180
"""A quiet machine needs about 12."""

PACK = "ComfyUI-FastH3"
ROOT = Path(__file__).resolve().parents[2]


def make_base(base: Path, models: Path) -> Path:
    """A base directory as a user has it: models, input, output, and the packs linked into custom_nodes."""
    for name in ("input", "output", "temp", "user", "custom_nodes"):
        (base / name).mkdir(parents=True, exist_ok=True)
    write_inputs(base / "input")
    (base / "models").symlink_to(models)
    (base / "custom_nodes" / PACK).symlink_to(ROOT)
    (base / "custom_nodes" / "fasth3_fixture").symlink_to(ROOT / "tests" / "comfy" / "fixture_pack")
    return base


def write_inputs(folder: Path) -> None:
    """Two pictures and a sound for the loaders of ComfyUI."""
    for name, colour in (("a.png", (200, 60, 20)), ("b.png", (20, 90, 180))):
        picture = Image.new("RGB", (120, 80), colour)
        picture.paste((240, 240, 240), (30, 20, 70, 60))
        picture.save(folder / name)
    tone = (torch.sin(torch.arange(16000) * 0.09) * 8000).to(torch.int16)
    with wave.open(str(folder / "tone.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(32000)
        file.writeframes(torch.stack([tone, tone.flip(0)], dim=1).contiguous().numpy().tobytes())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class ComfyServer:
    """`with ComfyServer(...) as server`: started on entry, ended by its process id on exit."""

    def __init__(self, app: Path, python: str, base: Path):
        self.app, self.python, self.base = app, python, base
        self.log_path = base / "server.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_seconds = 0.0

    def __enter__(self) -> "ComfyServer":
        command = [self.python, "main.py", *FLAGS, "--listen", "127.0.0.1", "--port", str(self.port),
                   "--base-directory", str(self.base)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        began = time.monotonic()
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(command, cwd=self.app, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            self._wait_until_up(began)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    def _wait_until_up(self, began: float) -> None:
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with code {self.process.returncode}:\n{self.log()[-4000:]}")
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() - began > START_SECONDS:
                    raise RuntimeError(f"ComfyUI is not up after {START_SECONDS} s:\n{self.log()[-4000:]}") from None
                time.sleep(0.25)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def log(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log_path.read_text(errors="replace"))

    def get(self, path: str):
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.load(response)

    def read(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return response.read()

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def submit(self, prompt: dict, **more) -> str:
        """Queue an API prompt; every node must validate, since the server answers 200 as soon as one output does."""
        status, answer = self.post("/prompt", {"prompt": prompt, "client_id": CLIENT, **more})
        assert status == 200, json.dumps(answer, indent=1)
        assert answer["node_errors"] == {}, json.dumps(answer["node_errors"], indent=1)
        return answer["prompt_id"]

    def wait(self, prompt_id: str, timeout: float = 300) -> dict:
        """The history entry of a finished prompt, whatever its end."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history and history[prompt_id]["status"]:
                return history[prompt_id]
            assert self.process.poll() is None, f"the server died:\n{self.log()[-4000:]}"
            time.sleep(0.1)
        raise AssertionError(f"prompt {prompt_id} is not finished after {timeout} s:\n{self.log()[-4000:]}")

    def run(self, prompt: dict, timeout: float = 300) -> dict:
        """Run to success and return the outputs of the history entry: node id -> ui."""
        entry = self.wait(self.submit(prompt), timeout)
        assert entry["status"]["status_str"] == "success", failure(entry) + "\n" + self.log()[-4000:]
        return entry["outputs"]

    def kept(self, name: str) -> dict[str, torch.Tensor]:
        """What a FixtureKeep node wrote."""
        return load_file(self.base / "output" / "kept" / f"{name}.safetensors")

    def files(self, outputs: dict) -> list[Path]:
        """Paths of everything that the ui of the outputs names as a file."""
        folders = {"output": self.base / "output", "temp": self.base / "temp", "input": self.base / "input"}
        return [
            folders[item["type"]] / item["subfolder"] / item["filename"]
            for ui in outputs.values()
            for items in ui.values()
            if isinstance(items, list)
            for item in items
            if isinstance(item, dict) and "filename" in item
        ]


def message(entry: dict, kind: str) -> dict:
    """One message of a history entry, e.g. `execution_error`; {} if there is none."""
    return next((data for name, data in entry["status"]["messages"] if name == kind), {})


def failure(entry: dict) -> str:
    error = message(entry, "execution_error")
    return f"{error.get('node_type')}: {error.get('exception_message')}\n" + "".join(error.get("traceback", ()))
