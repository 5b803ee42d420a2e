"""One HTTP request to the broker's app, made by hand on virtual time: no client library, no sockets."""

from __future__ import annotations

import asyncio
import json
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI


@dataclass
class Call:
    """The client sees every send of the app, and can hang up."""

    name: str
    path: str
    body: dict[str, Any]
    begun_s: float
    hang_up_after: int | None = None
    """Hangs up when this many frames of the answer have come."""
    status: int = 0
    chunks: list[bytes] = field(default_factory=list)
    ended_s: float | None = None
    hung_up_s: float | None = None
    starts: int = 0
    ends: int = 0
    task: asyncio.Task[None] = field(init=False)
    _inbox: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)

    def start(self, app: FastAPI, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        raw = json.dumps(self.body).encode()
        self._inbox.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "path": self.path, "raw_path": self.path.encode(), "query_string": b"",
            "headers": [(b"x-request-id", self.name.encode())], "scheme": "http", "root_path": "",
            "server": ("broker", 80), "client": ("sofa", 1),
        }  # fmt: skip
        self.task = loop.create_task(app(scope, self._inbox.get, self._send), context=context)

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.starts += 1
            self.status = message["status"]
            return
        self.chunks.append(message["body"])
        if not message.get("more_body"):
            self.ends += 1
            self.ended_s = asyncio.get_running_loop().time()
        if len(self.chunks) == self.hang_up_after:
            self.hang_up()

    @property
    def hung_up(self) -> bool:
        return self.hung_up_s is not None

    def hang_up(self) -> None:
        """The client is gone. Does nothing once the answer is whole."""
        if not self.ends and not self.hung_up:
            self.hung_up_s = asyncio.get_running_loop().time()
            self._inbox.put_nowait({"type": "http.disconnect"})

    def frames(self) -> list[Any]:
        """The events of a stream; fails unless each chunk is one whole event."""
        said = []
        for chunk in self.chunks:
            if chunk:
                assert chunk.startswith(b"data: "), chunk
                assert chunk.endswith(b"\n\n"), chunk
                text = chunk[6:-2]
                said.append("[DONE]" if text == b"[DONE]" else json.loads(text))
        return said

    def json(self) -> Any:
        """The whole answer."""
        return json.loads(b"".join(self.chunks))
