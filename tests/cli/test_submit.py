"""Mirrors cli/submit.py against a server that answers as ComfyUI does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlparse

import pytest
from comfyui_fasth3 import cli
from comfyui_fasth3.cli import submit

GRAPH = {"1": {"class_type": "A", "inputs": {"seed": 0}}}
SAVED = {"filename": "v_00001_.mp4", "subfolder": "video", "type": "output"}
OK = {"status": {"status_str": "success", "completed": True, "messages": []},
      "outputs": {"1": {"images": [SAVED], "animated": [True], "text": ["hello"]}}}


@pytest.fixture
def comfy(monkeypatch):
    """`comfy.url`, `comfy.posts`; set `answer`, `history` (one entry a poll, the last one stays) and `running`."""
    monkeypatch.setattr(submit, "_POLL_SECONDS", 0.01)
    state = SimpleNamespace(posts=[], answer=(200, {"prompt_id": "p", "number": 1, "node_errors": {}}), history=[OK],
                            running=[], pending=[], file=b"film")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def reply(self, body, code=200):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.posts.append((self.path, body))
            self.reply(*reversed(state.answer)) if self.path == "/prompt" else self.reply(b"")

        def do_GET(self):
            url = urlparse(self.path)
            if url.path == "/queue":
                self.reply({"queue_running": state.running, "queue_pending": state.pending})
            elif url.path == "/view":
                state.viewed = parse_qs(url.query)
                self.reply(state.file)
            else:
                entry = state.history.pop(0) if len(state.history) > 1 else state.history[0]
                self.reply({} if entry is None else {"p": entry})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def send(comfy, tmp_path):
    def send(*flags):
        (tmp_path / "g.json").write_text(json.dumps(GRAPH))
        return cli.main(["submit", str(tmp_path / "g.json"), "--server", comfy.url, "--output", str(tmp_path / "out"),
                         *flags])

    return send


def test_queues_waits_and_fetches(comfy, send, tmp_path, capsys):
    comfy.history = [None, None, OK]
    comfy.pending = [[3, "other"], [4, "p"]]
    assert send("--set", "1.seed=7") == 0
    assert comfy.posts[0][1]["prompt"]["1"]["inputs"] == {"seed": 7}
    assert (tmp_path / "out" / "video" / "v_00001_.mp4").read_bytes() == b"film"
    assert comfy.viewed == {"filename": ["v_00001_.mp4"], "subfolder": ["video"], "type": ["output"]}
    shown = capsys.readouterr().out
    assert "waiting, 1 before it" in shown and "node 1: hello" in shown and "v_00001_.mp4" in shown


NODE_ERRORS = {"1": {"class_type": "A", "errors": [{"message": "Value not in list", "details": "seed: 0"}]}}


def test_a_graph_that_would_run_in_part_is_a_failure_and_is_taken_back(comfy, send, capsys):
    comfy.answer = (200, {"prompt_id": "p", "number": 1, "node_errors": NODE_ERRORS})
    assert send() == 1
    assert "node 1 (A): Value not in list: seed: 0" in capsys.readouterr().err
    assert ("/queue", {"delete": ["p"]}) in comfy.posts


def test_refusal_names_every_node(comfy, send, capsys):
    error = {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation", "details": ""}
    comfy.answer = (400, {"error": error, "node_errors": NODE_ERRORS})
    assert send() == 1
    shown = capsys.readouterr().err
    assert "Prompt outputs failed validation" in shown and "seed: 0" in shown


@pytest.mark.parametrize("messages, said", [
    ([["execution_start", {}], ["execution_error", {
        "node_id": "5", "node_type": "FastH3Sampler", "exception_message": "no room\n"}]],
     "node 5 (FastH3Sampler) failed: no room"),
    ([["execution_interrupted", {"node_id": "5", "node_type": "FastH3Sampler"}]], "stopped by somebody at node 5"),
    ([], "the server's log says why"),
])  # fmt: skip
def test_failure_while_running(comfy, send, capsys, messages, said):
    comfy.history = [{"status": {"status_str": "error", "completed": False, "messages": messages}, "outputs": {}}]
    assert send() == 1
    assert said in capsys.readouterr().err


def test_timeout_cancels_only_this_prompt(comfy, send, capsys):
    comfy.history = [None]
    comfy.running = [[1, "other"]]
    assert send("--timeout", "0.1") == 1
    assert "not finished after 0.1 s" in capsys.readouterr().err
    assert [path for path, _ in comfy.posts] == ["/prompt", "/queue"]
    comfy.running = [[1, "p"]]
    assert send("--timeout", "0.1") == 1
    assert comfy.posts[-1] == ("/interrupt", {"prompt_id": "p"})


def test_no_server(tmp_path, capsys):
    (tmp_path / "g.json").write_text(json.dumps(GRAPH))
    assert cli.main(["submit", str(tmp_path / "g.json"), "--server", "http://127.0.0.1:9"]) == 1
    assert "no ComfyUI at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:8188", "ftp://127.0.0.1", "comfy"])
def test_no_url(tmp_path, capsys, url):
    (tmp_path / "g.json").write_text(json.dumps(GRAPH))
    assert cli.main(["submit", str(tmp_path / "g.json"), "--server", url]) == 1
    assert f"server='{url}': expected a URL such as http://127.0.0.1:8188" in capsys.readouterr().err


def test_a_server_that_is_no_comfyui(comfy, send, capsys):
    comfy.answer = (200, b"<html>")
    assert send() == 1
    assert "/prompt answers with no JSON: is that a ComfyUI?" in capsys.readouterr().err


def test_temporary_files_are_not_fetched(comfy, send, tmp_path):
    comfy.history = [{**OK, "outputs": {"1": {"images": [SAVED | {"type": "temp"}]}}}]
    assert send() == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("subfolder", ["../..", "/etc", "a/../../b", "..\\.."])
def test_a_server_cannot_write_outside_the_output_folder(comfy, send, tmp_path, capsys, subfolder):
    comfy.history = [{**OK, "outputs": {"1": {"images": [SAVED | {"subfolder": subfolder}]}}}]
    assert send() == 1
    assert "outside the output folder" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["g.json"]


def test_a_broken_download_leaves_nothing(comfy, send, tmp_path, monkeypatch):
    def broken(self, request):
        if "/view" in request.full_url:
            raise submit.ServerError("cut")
        return real(self, request)

    real = submit.Server._open
    monkeypatch.setattr(submit.Server, "_open", broken)
    assert send() == 1
    assert not list((tmp_path / "out").rglob("*.*"))
