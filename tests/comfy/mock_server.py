"""A server shaped like ComfyUI's, without ComfyUI: the real frontend, given node schemas, the pack's files, /prompt.

It lets the real editor open, draw and export the shipped workflows where no ComfyUI is installed. A queued prompt is
validated against the schemas and, if every node passes, reported as finished; nothing is executed.
"""

import asyncio
import contextlib
import importlib.util
import io
import json
import threading
import uuid
from pathlib import Path

from aiohttp import web
from PIL import Image

from .prompt_check import node_errors

TEMPLATE_FOLDERS = ("example_workflows", "example", "examples", "workflow", "workflows")
"""Where ComfyUI looks for a pack's templates; it serves the first that exists."""


def frontend_static() -> Path | None:
    """The built frontend inside the package comfyui-frontend-package, if that is installed."""
    spec = importlib.util.find_spec("comfyui_frontend_package")
    return Path(spec.submodule_search_locations[0]) / "static" if spec else None


def _constant_answers() -> dict:
    return {
        "/system_stats": {
            "system": {"os": "linux", "comfyui_version": "0.33.0", "python_version": "3", "pytorch_version": "2",
                       "embedded_python": False, "argv": [], "ram_total": 1, "ram_free": 1},
            "devices": [],
        },
        "/users": {"storage": "server", "migrated": True},
        "/features": {"supports_preview_metadata": False, "max_upload_size": 2**27},
        "/queue": {"queue_running": [], "queue_pending": []},
        "/jobs": {"jobs": [], "pagination": {"offset": 0, "limit": 0, "total": 0, "has_more": False}},
        "/embeddings": [], "/models": [], "/experiment/models": [], "/global_subgraphs": {}, "/node_replacements": {},
        "/internal/folder_paths": {}, "/internal/logs/raw": {"entries": [], "size": {"cols": 80, "rows": 24}},
        "/templates/index.json": [], "/userdata": [],
    }


class MockServer:
    """`with MockServer(static, object_info, packs) as server`: serves on `server.url` from a thread.

    Args:
        static: the frontend's built files.
        object_info: what /object_info answers.
        packs: folder name -> (root, web folder) of each custom node pack.
    """

    def __init__(self, static: Path, object_info: dict, packs: dict[str, tuple[Path, Path]]):
        self.static, self.object_info, self.packs = static, object_info, packs
        self.answers = _constant_answers()
        self.settings: dict = {}
        self.history: dict = {}
        self.sockets: dict[str, web.WebSocketResponse] = {}

    def __enter__(self) -> "MockServer":
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(30)
        return self

    def __exit__(self, *exc) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**27)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, shutdown_timeout=1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/api") or "/"
        if path == "/ws":
            return await self._websocket(request)
        if request.method == "POST":
            return await self._post(path, await request.json() if request.can_read_body else None)
        head, _, tail = path.lstrip("/").partition("/")
        if path in self.answers:
            return web.json_response(self.answers[path])
        if head == "object_info":
            return web.json_response({tail: self.object_info[tail]} if tail else self.object_info)
        if head == "settings":
            return web.json_response(self.settings)
        if head == "history":
            return web.json_response({k: v for k, v in self.history.items() if not tail or k == tail})
        if path == "/view":
            return web.Response(body=_picture(), content_type="image/png")
        if path == "/extensions":
            return web.json_response(self._scripts())
        if path == "/workflow_templates":
            return web.json_response({name: names for name, (root, _) in self.packs.items()
                                      if (names := sorted(p.stem for p in _templates(root).glob("*.json")))})
        if path == "/i18n":
            return web.json_response(self._locales())
        return self._file(path)

    def _file(self, path: str) -> web.StreamResponse:
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            return web.Response(status=400)
        root, rest = self.static, parts or ["index.html"]
        if len(parts) > 2 and parts[1] in self.packs:
            pack, web_folder = self.packs[parts[1]]
            if parts[0] == "extensions":
                root, rest = web_folder, parts[2:]
            elif parts[0] == "workflow_templates":
                root, rest = _templates(pack), parts[2:]
        target = root.joinpath(*rest)
        return web.FileResponse(target) if target.is_file() else web.Response(status=404)

    def _scripts(self) -> list[str]:
        found = ["/" + str(p.relative_to(self.static)) for p in (self.static / "extensions").rglob("*.js")]
        for name, (_, folder) in self.packs.items():
            found += [f"/extensions/{name}/{p.relative_to(folder)}" for p in folder.rglob("*.js")]
        return found

    def _locales(self) -> dict:
        merged: dict = {}
        for root, _ in self.packs.values():
            for path in root.glob("locales/*/*.json"):
                language, data = merged.setdefault(path.parent.name, {}), json.loads(path.read_text("utf-8"))
                language.update(data if path.stem == "main" else {path.stem: data})
        return merged

    async def _post(self, path: str, body) -> web.Response:
        if path == "/prompt":
            return await self._prompt(body)
        if path.startswith("/settings/"):
            self.settings[path.removeprefix("/settings/")] = body
        elif path == "/settings":
            self.settings.update(body)
        return web.json_response({})

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        client = request.query.get("clientId") or uuid.uuid4().hex
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets[client] = socket
        status = {"exec_info": {"queue_remaining": 0}}
        await socket.send_json({"type": "status", "data": {"status": status, "sid": client}})
        async for _ in socket:
            pass
        self.sockets.pop(client, None)
        return socket

    async def _prompt(self, body: dict) -> web.Response:
        errors = node_errors(body["prompt"], self.object_info)
        if errors:
            error = {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation",
                     "details": "", "extra_info": {}}
            return web.json_response({"error": error, "node_errors": errors}, status=400)
        prompt_id = uuid.uuid4().hex
        status = {"status_str": "success", "completed": True, "messages": []}
        self.history[prompt_id] = {"prompt": [0, prompt_id, body["prompt"], {}, []], "outputs": {}, "status": status}
        self.finishing = asyncio.create_task(self._finish(body.get("client_id"), prompt_id))
        return web.json_response({"prompt_id": prompt_id, "number": 1, "node_errors": {}})

    async def _finish(self, client: str | None, prompt_id: str) -> None:
        await asyncio.sleep(0.05)  # after the answer to the POST
        socket = self.sockets.get(client)
        if socket is None:
            return
        with contextlib.suppress(ConnectionResetError):
            for kind, data in (("execution_start", {}), ("executing", {"node": None}), ("execution_success", {})):
                await socket.send_json({"type": kind, "data": {"prompt_id": prompt_id, **data}})


def _picture() -> bytes:
    """What every file of the input folder looks like here."""
    data = io.BytesIO()
    Image.new("RGB", (96, 64), (90, 90, 90)).save(data, "PNG")
    return data.getvalue()


def _templates(root: Path) -> Path:
    return next((root / name for name in TEMPLATE_FOLDERS if (root / name).is_dir()), root / TEMPLATE_FOLDERS[0])
