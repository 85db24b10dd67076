"""Engines that can be made to fail in all six ways: in this process, or in one of their own to kill and to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDict

from tests.support.fakes import MESSAGE, RESPONSE, FakeEngine, Seen, ok

STORED = "/v1/responses"
DOOR = "x-door"  # header of each request of a test, with the name of the door; it goes along to engines


@dataclass
class StoringEngine(FakeEngine):
    """A vLLM that keeps responses, under ids that name its port."""

    models: tuple[str, ...] = ("m", "n")
    owned_by: str = "vllm"
    made: list[str] = field(default_factory=list)  # ids of the responses that it has
    next_id: str = ""  # id of the next response, in place of one of its own
    strays: list[str] = field(default_factory=list)  # paths of requests that no client of the test has sent
    delay_s: float = 0.0
    text: str | None = None  # every answer, in place of its own

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.method, request.raw_path, CIMultiDict(request.headers), body))
        if DOOR not in request.headers:
            self.strays.append(request.path)
        await asyncio.sleep(self.delay_s)
        if self.text is not None and not self.next_id:
            return web.Response(text=self.text)
        if request.path == STORED:
            id_, self.next_id = self.next_id or f"resp_{self.port}_{len(self.made)}", ""
            self.made.append(id_)
            return web.json_response({**RESPONSE, "id": id_})
        if request.path.startswith(STORED + "/"):
            known = request.path.removeprefix(STORED + "/") in self.made
            return web.json_response(
                {**RESPONSE, "id": self.made[0]} if known else MESSAGE, status=200 if known else 404
            )
        return await ok(self, request)

    async def _models(self, request: web.Request) -> web.Response:
        return await super()._models(request) if self.text is None else web.Response(text=self.text)


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"
        self.port = port

    async def kill(self) -> None:
        """End it, as by `kill -9`."""
        self._process.kill()
        await self._process.wait()

    def freeze(self) -> None:
        """Stop it where it is."""
        self._process.send_signal(signal.SIGSTOP)


@asynccontextmanager
async def engine_process() -> AsyncIterator[EngineProcess]:
    """One that serves."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.away.engines", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            port = int(await process.stdout.readline())
        yield EngineProcess(process, port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serve() -> None:
    parent = os.getppid()
    async with StoringEngine() as engine:
        print(engine.port, flush=True)
        while os.getppid() == parent:  # a test that was killed takes it along
            await asyncio.sleep(1)


if __name__ == "__main__":
    asyncio.run(_serve())
