"""The child of worker.py: load ComfyUI, the H3 nodes, the fixture pack and this repository; answer until stdin ends."""

import json
import sys
from pathlib import Path

answers, sys.stdout = sys.stdout, sys.stderr  # ComfyUI may print

from executor import Executor  # noqa: E402


def answer(value: dict) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


executor = Executor(Path(sys.argv[1]))
answer({
    "failed": executor.failed, "changed": executor.changed_by_import, "functions": len(executor.before),
})
for line in sys.stdin:
    request = json.loads(line)
    answer(getattr(executor, "do_" + request.pop("command"))(**request))
