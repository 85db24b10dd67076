"""The questions of every cell: what must be closed, and what is still served; asked of a proxy or of a picker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import grpc

from router.extproc.metadata import DESTINATION
from router.router_server import RouterServer
from tests.away.cells import REQUESTS, RESPONSES, SERVED
from tests.away.engines import DOOR, STORED, StoringEngine
from tests.extproc.asking import CHAT, asking, removed, set_headers
from tests.support.keyring import Keyring

ANSWER_S_MAX = 60.0  # longest wait for an answer that should come
NO_ANSWER = 0
TIMES = 4  # requests that must be served: two for each of two engines, which take turns
WRONG = {"authorization": "Bearer wr-a-key-that-was-never-in-the-keys-file-of-this"}


@dataclass(frozen=True, slots=True)
class Question:
    """One request of a client."""

    door: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None

    @property
    def raw(self) -> bytes:
        """The body's bytes."""
        return b"" if self.body is None else json.dumps(self.body).encode()


Ask = Callable[[Question], Awaitable[int]]  # gives the status, or NO_ANSWER


def chat(model: str = "m", tenant: str = "acme") -> dict[str, Any]:
    """A body with a tenant's words."""
    return {"model": model, "messages": [{"role": "user", "content": f"words of {tenant}"}]}


def closed(ring: Keyring, ids: Sequence[str]) -> list[Question]:
    """What nobody may have."""
    acme, rival = ring.of("acme"), ring.of("rival")
    asked = [
        Question("no key", "POST", CHAT, {}, chat()),
        Question("no key", "POST", STORED, {}, {"model": "m", "input": "x"}),
        Question("no key", "GET", "/v1/models"),
        Question("wrong key", "POST", CHAT, WRONG, chat()),
        Question("revoked key", "POST", CHAT, ring.of("gone"), chat(tenant="gone")),
        Question("rate", "POST", CHAT, ring.of("spent"), chat(tenant="spent")),
        Question("other model", "POST", CHAT, acme, chat("n")),
        Question("engine paths", "POST", "/sleep", acme, {}),
        Question("engine paths", "POST", "/wake_up", acme, {}),
        Question("engine paths", "POST", "/v1/load_lora_adapter", acme, {"lora_name": "x", "lora_path": "y"}),
        Question("engine paths", "GET", "/admin/replicas", acme),
    ]
    for id_ in ids:
        asked += [
            Question("others' responses", "GET", f"{STORED}/{id_}", rival),
            Question(
                "others' responses", "POST", STORED, rival, {"model": "m", "input": "x", "previous_response_id": id_}
            ),
        ]
    return asked


async def opened(ask: Ask, ring: Keyring, ids: Sequence[str], engines: Sequence[StoringEngine]) -> set[str]:
    """Doors that are open: what was answered as if it were allowed, or has reached an engine."""
    for engine in engines:
        engine.seen.clear()
    questions = closed(ring, ids)
    statuses = await asyncio.gather(*map(ask, questions))
    doors = {each.door for each, status in zip(questions, statuses, strict=True) if 0 < status < 400}
    return doors | {seen.headers.get(DOOR, "sent elsewhere") for engine in engines for seen in engine.seen}


async def served(ask: Ask, ring: Keyring, ids: Sequence[str]) -> set[str]:
    """What a tenant still gets, whole."""
    acme = ring.of("acme")
    asked = [Question(REQUESTS, "POST", CHAT, acme, chat()) for _ in range(TIMES)]
    asked += [Question(RESPONSES, "GET", f"{STORED}/{id_}", acme) for id_ in ids]
    statuses = await asyncio.gather(*map(ask, asked))
    return {*SERVED} - {each.door for each, status in zip(asked, statuses, strict=True) if status != 200}


def handed_on(ring: Keyring, engines: Sequence[StoringEngine]) -> set[str]:
    """Whether an engine was shown a client's key, or a prompt of acme, which is isolated, without a salt."""
    for seen in (each for engine in engines for each in engine.seen):
        shown = "\n".join(seen.headers.values()) + seen.body.decode()
        if any(key in shown for key in ring.keys.values()) or (
            b"words of acme" in seen.body and "cache_salt" not in seen.json
        ):
            return {"handed on"}
    return set()


def of_edge(session: aiohttp.ClientSession, url: str, answer_s_max: float = ANSWER_S_MAX) -> Ask:
    """Ask over HTTP."""
    timeout = aiohttp.ClientTimeout(answer_s_max)

    async def ask(question: Question) -> int:
        headers = {**question.headers, DOOR: question.door, "content-type": "application/json"}
        try:
            async with session.request(
                question.method, url + question.path, data=question.raw, headers=headers, timeout=timeout
            ) as got:
                await got.read()
                return got.status
        except (aiohttp.ClientError, TimeoutError):
            return NO_ANSWER

    return ask


def of_picker(port: int, answer_s_max: float = ANSWER_S_MAX) -> Ask:
    """Ask as a gateway that fails closed does: what no picker has placed does not pass."""
    app = cast("RouterServer", SimpleNamespace(extproc=SimpleNamespace(port=port)))

    async def ask(question: Question) -> int:
        try:
            async with asyncio.timeout(answer_s_max), asking(app) as it:
                whole = not question.raw
                headers = {name.lower(): value for name, value in question.headers.items()}
                await it.head(question.path, method=question.method, headers=headers, end=whole)
                said = await it.hear()
                if said is not None and said.HasField("request_headers") and not whole:
                    await it.body(question.raw)
                    said = await it.hear()
                if said is None:
                    return NO_ANSWER
                if said.HasField("immediate_response"):
                    return int(said.immediate_response.status.code)
                if DESTINATION not in set_headers(said):
                    return NO_ANSWER
                assert "authorization" in removed(said), removed(said)
                if b"words of acme" in question.raw:
                    assert b"cache_salt" in said.request_body.response.body_mutation.body
                return 200
        except (grpc.aio.AioRpcError, TimeoutError):
            return NO_ANSWER

    return ask


async def admin_pages(
    session: aiohttp.ClientSession, url: str, ring: Keyring, answer_s_max: float = ANSWER_S_MAX
) -> set[str]:
    """The door of the admin listener, if it is open."""
    pages = ("/admin/replicas", "/admin/decisions", "/metrics")
    asked = [Question("admin pages", "GET", page, who) for page in pages for who in ({}, ring.of("acme"), WRONG)]
    statuses = await asyncio.gather(*map(of_edge(session, url, answer_s_max), asked))
    return {"admin pages"} if any(0 < status < 400 for status in statuses) else set()
