"""submit: an API-format graph to a running ComfyUI; waits for it and fetches what it saved."""

import argparse
import json
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from ..fasth3_core.atomic import replacing
from ..fasth3_core.errors import ConfigError, FastH3Error
from . import options
from .graph import apply_settings, read_graph, saved_files

_POLL_SECONDS = 0.5
_REQUEST_SECONDS = 60


class ServerError(FastH3Error):
    """The server is not there, refuses the graph, or fails while it runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", type=Path, help="API-format JSON")
    parser.add_argument("--server", default="http://127.0.0.1:8188", help="URL of ComfyUI (%(default)s)")
    options.add_set(parser)
    parser.add_argument("--output", type=Path, default=Path("output"), help="where files are put (%(default)s)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds to wait (%(default)g)")


def main(args: argparse.Namespace) -> int:
    graph = read_graph(args.graph)
    apply_settings(graph, args.set)
    if not args.server.startswith(("http://", "https://")):
        raise ConfigError("server", args.server, "a URL such as http://127.0.0.1:8188", "Put http:// in front.")
    server = Server(args.server.rstrip("/"))
    prompt_id = server.queue(graph)
    print(f"queued as {prompt_id}", flush=True)
    try:
        outputs = server.wait(prompt_id, args.timeout, lambda state: print(state, flush=True))
    except (KeyboardInterrupt, ServerError):
        server.cancel(prompt_id)
        raise
    for node_id, result in outputs.items():
        for text in result.get("text", ()):
            print(f"node {node_id}: {text}")
        for item in saved_files(result):
            print(f"node {node_id} saved {server.fetch(item, args.output)}")
    return 0


@dataclass
class Server:
    """The few calls of ComfyUI's HTTP interface that a client needs."""

    url: str

    def queue(self, graph: dict[str, Any]) -> str:
        """Queue a graph; returns its prompt id.

        The server runs the valid outputs of a graph and drops the others with no more than a note, so any note is a
        failure here.
        """
        answer = self._post("/prompt", {"prompt": graph, "client_id": uuid.uuid4().hex})
        if answer.get("node_errors"):
            self.cancel(answer["prompt_id"])
            raise ServerError("the server would run only a part of the graph:\n" + _node_errors(answer))
        return answer["prompt_id"]

    def wait(self, prompt_id: str, timeout: float, say) -> dict[str, Any]:
        """Outputs by node id, once the prompt has run. Raises ServerError if it fails or takes too long."""
        deadline, last = time.monotonic() + timeout, None
        while time.monotonic() < deadline:
            entry = self._get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                _check_status(entry.get("status", {}))
                return entry["outputs"]
            if (state := self._place(prompt_id)) != last:
                say(state)
                last = state
            time.sleep(_POLL_SECONDS)
        raise ServerError(f"{prompt_id} has not finished after {timeout:g} s. Give --timeout more.")

    def cancel(self, prompt_id: str) -> None:
        """Take a prompt out of the queue, and stop it if it is the one that runs; never another one."""
        self._post("/queue", {"delete": [prompt_id]})
        if any(row[1] == prompt_id for row in self._get("/queue")["queue_running"]):
            self._post("/interrupt", {"prompt_id": prompt_id})

    def fetch(self, item: dict[str, str], folder: Path) -> Path:
        """Copy one output file into `folder`, in its own subfolder."""
        inside = PurePosixPath(item.get("subfolder", "").replace("\\", "/")) / PurePosixPath(item["filename"]).name
        if inside.is_absolute() or ".." in inside.parts:
            raise ServerError(f"the server names a file outside the output folder: {inside}")
        path = folder / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        query = urlencode({key: item.get(key, "") for key in ("filename", "subfolder", "type")})
        url = f"{self.url}/view?{query}"
        with replacing(path) as partial, self._open(Request(url)) as response, open(partial, "wb") as file:
            shutil.copyfileobj(response, file)
        return path

    def _place(self, prompt_id: str) -> str:
        queue = self._get("/queue")
        if any(row[1] == prompt_id for row in queue["queue_running"]):
            return "running"
        ahead = sorted(row[0] for row in queue["queue_pending"])
        mine = next((row[0] for row in queue["queue_pending"] if row[1] == prompt_id), None)
        return "finishing" if mine is None else f"waiting, {ahead.index(mine) + len(queue['queue_running'])} before it"

    def _get(self, path: str) -> dict[str, Any]:
        return self._answer(Request(self.url + path))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        return self._answer(Request(self.url + path, data, {"Content-Type": "application/json"}))

    def _answer(self, request: Request) -> dict[str, Any]:
        with self._open(request) as response:
            text = response.read()
        try:
            return json.loads(text) if text else {}
        except ValueError as error:
            raise ServerError(f"{request.full_url} answers with no JSON: is that a ComfyUI? {error}") from error

    def _open(self, request: Request):
        try:
            return urlopen(request, timeout=_REQUEST_SECONDS)
        except HTTPError as error:
            raise ServerError(f"{request.full_url}: {_refusal(error)}") from error
        except URLError as error:
            raise ServerError(f"no ComfyUI at {self.url}: {error.reason}. Start it, or give --server.") from error


def _refusal(error: HTTPError) -> str:
    try:
        answer = json.loads(error.read())
    except json.JSONDecodeError:
        return f"HTTP {error.code} {error.reason}"
    said = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(said, dict):
        return f"HTTP {error.code}: {answer}"
    return "\n".join(filter(None, [f"{said.get('message')} {said.get('details', '')}".strip(), _node_errors(answer)]))


def _node_errors(answer: dict[str, Any]) -> str:
    return "\n".join(
        f"  node {node_id} ({found.get('class_type')}): {error.get('message')}: {error.get('details')}"
        for node_id, found in (answer.get("node_errors") or {}).items()
        for error in found.get("errors", ())
    )


def _check_status(status: dict[str, Any]) -> None:
    if status.get("status_str") != "error":
        return
    for kind, data in status.get("messages", ()):
        if kind == "execution_error":
            where = f"node {data.get('node_id')} ({data.get('node_type')})"
            raise ServerError(f"{where} failed: {str(data.get('exception_message')).strip()}")
        if kind == "execution_interrupted":
            raise ServerError(f"stopped by somebody at node {data.get('node_id')} ({data.get('node_type')}).")
    raise ServerError("the graph failed; the server's log says why.")
