"""Handling of requests by a faulty replica; `process.py` is the process around it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from dataclasses import dataclass, replace
from typing import Any

from loadtest.common import answers as vllm
from loadtest.faults.upstream import answers, floods

EARLY = ("rst", "fin", "garbage_http", "hang", "hang_headers", "400", "429", "500", "503")
MID = ("mid_rst", "mid_fin", "mid_cut", "mid_eof", "mid_done", "mid_garbage", "mid_stall")
BEFORE_FAULT_S = 0.03  # time for bytes written before a fault to be sent
HEAD_BYTES_MAX = 64 << 10

_MARKER = re.compile(rb"\[\[([^\]]*)\]\]")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST
_STATUS = {"400": "400 Bad Request", "429": "429 Too Many Requests", "503": "503 Service Unavailable"}
_SHUTDOWN = b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.",'
_SHUTDOWN += b'"type":"InternalServerError","param":null,"code":500}}'


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Behaviour of a replica for its requests."""

    fault: str = ""
    """A fault of EARLY or MID; empty: no fault."""
    count: int = -1
    """Number of requests with the fault; -1: all."""
    after: int = 2
    """Tokens before a fault in mid-stream."""
    ttft_s: float = 0.0
    token_s: float = 0.002
    tokens: int = 8
    retry_after: str = "1"
    health: int = 200
    slots: int = 0
    """Requests served at a time; the others wait as in an engine's queue; 0: no limit."""
    flood_bytes: int = 0
    """Number of bytes to send instead of tokens, as fast as they are accepted."""
    flood: str = "events"
    """Kind of these bytes, of `floods.FLOODS`."""


class State:
    """One replica: its behaviour, and its observations."""

    def __init__(self, name: str, model: str = answers.MODEL) -> None:
        self.name = name
        self.page_of_models = answers.page_of_models(model)
        self.behaviour = Behaviour()
        self.seen: list[dict[str, Any]] = []
        self.connections: set[FaultyConnection] = set()
        self.opened = self.running = self.waiting = self.flooded_bytes = self.prompt_tokens = self.tokens = 0
        self.slots: asyncio.Semaphore | None = None
        self.healthy_s: float | None = None  # the first good response of /health since it was opened

    def behave(self, fields: dict[str, Any]) -> None:
        """Set the behaviour for later requests; omitted fields have their defaults."""
        self.behaviour = Behaviour(**fields)
        self.slots = asyncio.Semaphore(self.behaviour.slots) if self.behaviour.slots else None

    def for_request(self, body: bytes) -> tuple[Behaviour, str]:
        """Return the behaviour for a request, and its id."""
        marker = _MARKER.search(body, 0, 4_096) or _MARKER.search(body, max(0, len(body) - 4_096))
        words = dict(w.partition("=")[::2] for w in marker[1].decode(errors="replace").split()) if marker else {}
        here = self.behaviour
        if here.fault and here.count == 0:
            here = replace(here, fault="")
        elif here.fault and here.count > 0:
            self.behaviour = replace(self.behaviour, count=here.count - 1)
        if self.name in words.get("at", self.name).split(","):
            typed = {"fault": str, "after": int, "ttft_s": float, "token_s": float, "tokens": int, "flood_bytes": int}
            typed["flood"] = str
            here = replace(here, **{k: typed[k](v) for k, v in words.items() if k in typed})
        return here, words.get("id", "")


class FaultyConnection(asyncio.Protocol):
    """One connection; requests are processed sequentially."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._held = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._record: dict[str, Any] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def busy(self) -> bool:
        """True if a request is being answered."""
        return self._task is not None

    def abort(self) -> None:
        """Close it at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._state.connections.add(self)
        self._state.opened += 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the end of the connection, closed by the client or by this replica."""
        self._state.connections.discard(self)
        if self._record is not None and self._record["closed_s"] is None:
            self._record["closed_s"] = time.monotonic()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        """Close the connection: the client has disconnected."""
        return False

    def pause_writing(self) -> None:
        """Pause writing: the client reads too slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Resume writing: the client reads again."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Buffer a piece of a request."""
        self._held += data
        if self._task is None:
            self._next()

    def _next(self) -> None:
        end = self._held.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if end < 0:
            return
        head = bytes(self._held[:end])
        length, at = vllm.LENGTH.search(head), end + 4
        if length:
            stop = at + int(length[1])
        elif vllm.CHUNKED.search(head):  # JSON has no bare CR LF, so the last chunk is unambiguous
            stop = self._held.find(b"\r\n" + vllm.LAST_CHUNK, at - 2) + 2 + len(vllm.LAST_CHUNK)
            if stop < at + len(vllm.LAST_CHUNK):
                return
        else:
            stop = at
        if len(self._held) < stop:
            return
        body = bytes(self._held[at:stop])
        del self._held[:stop]
        self._task = asyncio.get_running_loop().create_task(self._answer(head, body))

    async def _answer(self, head: bytes, body: bytes) -> None:
        try:
            method, target, _ = (*head.split(b"\r\n", 1)[0].split(b" "), b"", b"")[:3]
            api = answers.BY_PATH.get(target.partition(b"?")[0])
            if method == b"POST" and api is not None:
                await self._generate(api, body)
            else:
                await self._page(target.partition(b"?")[0])
        finally:
            self._task = None
        if self._held and not self._transport.is_closing():
            self._next()

    async def _page(self, path: bytes) -> None:
        state = self._state
        if path == b"/health":
            if not state.behaviour.health:
                await asyncio.Event().wait()
            healthy = state.behaviour.health == 200
            if healthy and state.healthy_s is None:
                state.healthy_s = time.monotonic()
            status = "200 OK" if healthy else "503 Service Unavailable"
            self._transport.write(vllm.plain(status))
        elif path == b"/metrics":
            page = vllm.metrics(answers.MODEL, state.running, state.waiting, state.prompt_tokens, state.tokens)
            self._transport.write(vllm.plain("200 OK", page, vllm.METRICS_KIND))
        elif path == b"/v1/models":
            self._transport.write(state.page_of_models)
        else:
            self._transport.write(vllm.NOT_FOUND)

    async def _generate(self, api: answers.Api, body: bytes) -> None:
        state = self._state
        do, id_ = state.for_request(body)
        record = {"id": id_, "api": api.name, "fault": do.fault, "came_s": time.monotonic()}
        self._record = record = {**record, "ended_s": None, "closed_s": None, "bytes": len(body)}
        state.seen.append(record)
        state.waiting += 1
        running = False
        try:
            async with state.slots or _NoLimit():
                state.waiting -= 1
                state.running += 1
                running = True
                await self._obey(api, do, streams=vllm.ASKS_STREAM.search(body) is not None)
            record["ended_s"] = time.monotonic()
        finally:
            if running:
                state.running -= 1
            else:
                state.waiting -= 1
            if not self._transport.is_closing():
                self._record = None

    async def _obey(self, api: answers.Api, do: Behaviour, *, streams: bool) -> None:
        if do.fault in EARLY:
            await self._early(do)
            return
        if do.flood_bytes:
            await self._flood(floods.FLOODS[do.flood](do.flood_bytes), do.flood_bytes)
            return
        await asyncio.sleep(do.ttft_s)
        self._state.prompt_tokens += answers.PROMPT_TOKENS
        if streams:
            await self._stream(api, do)
            return
        body = json.dumps(api.whole).encode()
        await asyncio.sleep(do.token_s * do.tokens)
        self._state.tokens += do.tokens
        whole = vllm.plain("200 OK", body)
        if not do.fault:
            self._transport.write(whole)
            return
        self._transport.write(whole[: -len(body) // 2])
        await asyncio.sleep(BEFORE_FAULT_S)
        await self._end(do.fault)

    async def _early(self, do: Behaviour) -> None:
        match do.fault:
            case "garbage_http":
                self._transport.write(b"\x00\xff\x13 what is this\r\n\r\n" * 3)
                self._transport.close()
            case "hang":
                await asyncio.Event().wait()
            case "hang_headers":
                self._transport.write(vllm.STREAM_HEAD)
                await asyncio.Event().wait()
            case "500":
                self._transport.write(vllm.plain("500 Internal Server Error", _SHUTDOWN))
            case "400" | "429" | "503":
                error = {"message": "no", "type": "x", "code": int(do.fault)}
                later = f"retry-after: {do.retry_after}\r\n" if do.fault != "400" else ""
                text = json.dumps({"error": error}).encode()
                self._transport.write(vllm.plain(_STATUS[do.fault], text, headers=later))
            case _:
                await self._end(f"mid_{do.fault}")

    async def _stream(self, api: answers.Api, do: Behaviour) -> None:
        write = self._transport.write
        write(vllm.STREAM_HEAD + b"".join(map(vllm.chunk, api.before)))
        tokens = api.tokens(do.after if do.fault else do.tokens)
        for i, event in enumerate(tokens):
            if i and do.token_s:
                await asyncio.sleep(do.token_s)
            write(vllm.chunk(event))
            self._state.tokens += 1
        if do.fault:
            await asyncio.sleep(BEFORE_FAULT_S)
            if do.fault == "mid_cut":
                write(vllm.chunk(api.tokens(1)[0])[:20])
            if do.fault == "mid_done":
                write(b"".join(map(vllm.chunk, api.done)))
            if do.fault == "mid_garbage":
                write(vllm.chunk(b"\x00\xff{{{ this is no event [1,2"))
            await self._end(do.fault)
            return
        write(b"".join(map(vllm.chunk, (*api.finish, *api.done))) + vllm.LAST_CHUNK)

    async def _end(self, fault: str) -> None:
        """End a faulty response."""
        match fault:
            case "mid_rst":
                sock: socket.socket = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                self._transport.abort()
            case "mid_eof" | "mid_done" | "mid_garbage":
                self._transport.write(vllm.LAST_CHUNK)
            case "mid_stall":
                await asyncio.Event().wait()
            case _:
                self._transport.close()

    async def _flood(self, flood: floods.Flood, size: int) -> None:
        self._transport.write(flood.begin)
        sent = 0
        while sent < size:
            await self._writable.wait()
            self._transport.write(flood.piece)
            sent += len(flood.piece)
            self._state.flooded_bytes += len(flood.piece)
            await asyncio.sleep(0)
        self._transport.write(flood.end)


class _NoLimit:
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...
