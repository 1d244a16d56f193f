"""ComfyUI's own executor without HTTP, in a process of its own (child/serve.py), spoken to in JSON lines.

The process of its own keeps ComfyUI's modules, `nodes` among them, out of the test process.
"""

import json
import os
import subprocess
from pathlib import Path

CHILD = Path(__file__).parent / "child" / "serve.py"


class Worker:
    """`with Worker(...) as worker`: `ask` sends one command and returns its answer."""

    def __init__(self, app: Path, python: str, base: Path):
        self.app, self.python, self.base = app, python, base

    def __enter__(self) -> "Worker":
        env = {**os.environ, "COMFY_APP": str(self.app), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [self.python, str(CHILD), str(self.base)]
        self.log = (self.base / "worker.log").open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env
        )
        self.started = self._read()
        return self

    def __exit__(self, *exc) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(f"the worker ended:\n{(self.base / 'worker.log').read_text()[-4000:]}")
        return json.loads(line)

    def ask(self, command: str, **arguments) -> dict:
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def run(self, prompt: dict) -> dict:
        """Run to success and return the ui outputs: node id -> ui."""
        answer = self.ask("run", prompt=prompt)
        assert answer["node_errors"] == {}, json.dumps(answer, indent=1)
        assert answer["success"], answer["error"]
        return answer["outputs"]
