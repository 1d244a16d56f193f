"""Listen to a server's websocket from a thread, as the browser does."""

import asyncio
import json
import threading
import time
from collections.abc import Callable

import aiohttp

CLIENT = "tests"
"""Prompts are submitted under this client id, so that their events arrive here."""


PREVIEW = (1).to_bytes(4, "big")
"""Begins a binary message with a preview picture; texts on nodes are binary too."""


class Events:
    """`with Events(server.url) as events`: every message since then, in order."""

    def __init__(self, url: str):
        self.url = url
        self.messages: list[tuple[str, dict]] = []
        self.previews: list[bytes] = []
        """The pictures, encoded."""
        self.ready = threading.Event()

    def __enter__(self) -> "Events":
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self._listen(),), daemon=True)
        self.thread.start()
        assert self.ready.wait(30), "the server's websocket did not open"
        return self

    def __exit__(self, *exc) -> None:
        asyncio.run_coroutine_threadsafe(self.socket.close(), self.loop).result(30)
        self.thread.join(30)

    async def _listen(self) -> None:
        async with aiohttp.ClientSession() as session:
            self.socket = await session.ws_connect(f"{self.url}/ws?clientId={CLIENT}", max_msg_size=0)
            self.ready.set()
            async for message in self.socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    event = json.loads(message.data)
                    self.messages.append((event["type"], event["data"]))
                elif message.type == aiohttp.WSMsgType.BINARY and message.data[:4] == PREVIEW:
                    self.previews.append(message.data[8:])

    def wait(self, wanted: Callable[[str, dict], bool], timeout: float = 60) -> dict:
        """Data of the first message, past or coming, that `wanted(type, data)` accepts."""
        end, checked = time.monotonic() + timeout, 0
        while time.monotonic() < end:
            while checked < len(self.messages):
                kind, data = self.messages[checked]
                checked += 1
                if wanted(kind, data):
                    return data
            time.sleep(0.02)
        raise AssertionError(f"no such event within {timeout} s; seen {[kind for kind, _ in self.messages]}")

    def finished(self) -> None:
        """Wait for the end of a prompt that succeeded: the history knows of it before all messages are here."""
        self.wait(lambda kind, data: kind == "execution_success")

    def steps(self, node: str) -> list[tuple[int, int]]:
        """(value, max) of every progress report of one node."""
        return [(data["value"], data["max"]) for kind, data in self.messages
                if kind == "progress" and str(data.get("node")) == node]
