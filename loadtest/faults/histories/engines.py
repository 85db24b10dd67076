"""Engines that keep responses, for placement and stored responses, in the benchmark's process."""

from __future__ import annotations

import itertools
from typing import Self

from aiohttp import web

MODEL = "m"


class StoringEngine:
    """`async with StoringEngine() as engine`: keeps the input of each response, also while it is closed."""

    def __init__(self) -> None:
        self.port = 0
        self.is_there = False
        self._kept: dict[str, str] = {}
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def keeps(self, id_: str) -> bool:
        """True if the engine is open and keeps the response of this id."""
        return self.is_there and id_ in self._kept

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Listen, on the same port as before, with all kept responses."""
        app = web.Application()
        app.router.add_get("/v1/models", _on_models)
        app.router.add_get("/health", _on_health)
        app.router.add_post("/v1/responses", self._on_response)
        app.router.add_post("/v1/chat/completions", self._on_chat)
        app.router.add_get("/v1/responses/{id}", self._on_read)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port, self.is_there = self._runner.addresses[0][1], True

    async def close(self) -> None:
        """Close the listener and all connections."""
        self.is_there = False
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _on_response(self, request: web.Request) -> web.Response:
        body = await request.json()
        id_ = body.get("request_id") or f"resp_{self.port}_{next(self._numbers)}"
        self._kept[id_] = body["input"]
        return web.json_response(self._response(id_))

    async def _on_chat(self, request: web.Request) -> web.Response:
        await request.read()
        message = {"index": 0, "message": {"role": "assistant", "content": "words"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response({"id": "c", "object": "chat.completion", "choices": [message], "usage": usage})

    async def _on_read(self, request: web.Request) -> web.Response:
        id_ = request.match_info["id"]
        return web.json_response(self._response(id_)) if id_ in self._kept else web.json_response({}, status=404)

    def _response(self, id_: str) -> dict[str, object]:
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        said = [{"type": "message", "content": [{"type": "output_text", "text": self._kept[id_]}]}]
        return {"id": id_, "object": "response", "status": "completed", "output": said, "usage": usage}


async def _on_models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})


async def _on_health(_: web.Request) -> web.Response:
    return web.Response()
