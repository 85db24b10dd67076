"""Usage that only the router asked for is taken out of a stream, and nothing else is changed, however it is cut."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web

from tests.support.fakes import USAGE, FakeEngine, running

BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
TURNS = 5  # of the event loop, in which the router reads a piece before the next one is written
ENDS = {"LF": b"\n\n", "CRLF": b"\r\n\r\n"}


def said(index: int = 0, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """One event of an answer, in whose text the word is as well."""
    choice = {"index": index, "delta": {"content": 'say "usage":\n\n'}, "finish_reason": reason}
    return {"id": "c", "choices": [choice], **more}


TAKEN = {"id": "c", "choices": [], "usage": USAGE}
STREAMS: dict[str, list[Any]] = {
    "as engines do": [said(), said(), said(0, "stop"), TAKEN, "[DONE]"],
    "null in every event": [said(usage=None), said(0, "stop", usage=None), TAKEN, "[DONE]"],
    "usage beside choices": [said(usage=USAGE), said(0, "stop", usage=USAGE), TAKEN, "[DONE]"],
    "told twice": [said(), said(0, "stop"), TAKEN, TAKEN, "[DONE]"],
    "told first": [TAKEN, said(), said(0, "stop"), "[DONE]"],
    "not told": [said(), said(0, "stop"), "[DONE]"],
    "two choices": [said(), said(1), said(0, "stop"), said(1, "stop"), TAKEN, "[DONE]"],
}


def random_cuts(whole: bytes) -> list[bytes]:
    """Pieces of 1 to 150 bytes, the same ones every time."""
    sizes, pieces = random.Random(1), list[bytes]()
    while whole:
        size = sizes.randint(1, 150)
        pieces.append(whole[:size])
        whole = whole[size:]
    return pieces


CUTS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "an event each": list,
    "all at once": lambda sent: [b"".join(sent)],
    "halves": lambda sent: [half for each in sent for half in (each[: len(each) // 2], each[len(each) // 2 :])],
    "anywhere": lambda sent: random_cuts(b"".join(sent)),
}


async def one_by_one(request: web.Request, pieces: list[bytes]) -> web.StreamResponse:
    """Send these pieces as an event stream, so that each is read by itself, as when an engine decodes."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    await response.write_eof()
    return response


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("events", STREAMS.values(), ids=STREAMS)
async def test_the_rest_passes_byte_for_byte(
    client: ClientSession, engine: FakeEngine, events: list[Any], end: bytes
) -> None:
    """Whatever an engine makes of the wish for usage, and wherever its bytes are cut, the client gets all events but
    those that have usage and no choices. An engine that sends usage beside choices sends it to all clients."""
    bytes_of = [b"data: " + (each if isinstance(each, str) else json.dumps(each)).encode() + end for each in events]
    passed = [sent for each, sent in zip(events, bytes_of, strict=True) if each is not TAKEN]
    expected = b"".join(bytes_of if events is STREAMS["usage beside choices"] else passed)
    async with running(engine, api__ask_usage=True) as app:
        async with client.post(app.url + "/v1/chat/completions", json=BODY) as left_alone:
            await left_alone.read()
        for name, cut in CUTS.items():
            engine.script.append(lambda _, request, cut=cut: one_by_one(request, cut(bytes_of)))
            async with client.post(app.url + "/v1/chat/completions", json=BODY) as answer:
                assert await answer.read() == expected, name
        assert engine.seen[1].json["stream_options"]["include_usage"] is True
