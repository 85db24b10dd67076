"""Long conversations that go on: only what is new is read, checked and counted, on the event loop."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any, cast

import pytest

from router.config.schema import LimitSettings
from router.http.request import Connection, Refusal, Request
from router.ingress.parser import RequestParser
from router.placement_api import PlacementService
from router.tokenization.request_tokens import RequestTokenizer
from tests.ingress.test_parser import Asked, Following

CHAT = "/v1/chat/completions"
LONG = 100  # messages of a kilobyte each


def turn(messages: int, last: object = "and then?") -> bytes:
    """The body of a conversation with so many messages; the last one as given."""
    said = [{"role": ("user", "assistant")[n % 2], "content": f"{n} words of it " * 70} for n in range(messages)]
    return json.dumps({"model": "m", "messages": [*said, {"role": "user", "content": last}], "stream": True}).encode()


class Jobs:
    """A reader's thread whose jobs are counted, and done at once."""

    def __init__(self) -> None:
        self.done = 0

    def submit(self, work: Any, *arguments: Any) -> Future[Any]:
        """Do it."""
        self.done += 1
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: bool) -> None:
        """Nothing to end."""


@pytest.fixture(params=[True, False], ids=["exact", "estimated"])
def reader(request: pytest.FixtureRequest) -> RequestParser:
    """One whose long bodies are those over 64 KB, with tokens and without."""
    tokens = cast("RequestTokenizer", Asked()) if request.param else None
    made = RequestParser(
        cast("PlacementService", Following()),
        tokens,
        LimitSettings(offload_bytes_min=64 << 10, json_depth_max=8, json_parts_max=400),
    )
    made._parse_thread.shutdown()
    made._parse_thread = cast("Any", Jobs())
    return made


async def read(reader: RequestParser, body: bytes) -> tuple[int, object]:
    """How many jobs of the thread it took, and what was read."""
    jobs = cast("Jobs", reader._parse_thread)
    request, before = Request(cast("Connection", None)), jobs.done
    request.method, request.target, request.path = "POST", CHAT, CHAT
    request.replace_body([body], len(body))
    question = await reader.parse(request, "id")
    assert question.wanted.ask.stream_options is None
    return jobs.done - before, (question.wanted.chain, question.wanted.ring_key, question.wanted.body_bytes)


async def test_what_is_known_needs_no_thread(reader: RequestParser) -> None:
    """The first two turns of a conversation are read in the thread, those behind them where they came in."""
    jobs = [(await read(reader, turn(LONG + 2 * more)))[0] for more in range(5)]
    assert jobs[0] > 0
    assert jobs[1] > 0
    assert jobs[2:] == [0, 0, 0]
    fresh = RequestParser(cast("PlacementService", Following()), None, LimitSettings(offload_bytes_min=1 << 30))
    fresh._parse_thread.shutdown()
    fresh._parse_thread = cast("Any", Jobs())
    assert (await read(reader, turn(LONG + 8)))[1] == (await read(fresh, turn(LONG + 8)))[1]


async def test_what_is_new_and_long_is_read_in_the_thread(reader: RequestParser) -> None:
    """However much of the conversation is known."""
    for more in range(4):
        await read(reader, turn(LONG + 2 * more))
    assert (await read(reader, turn(LONG + 8, last="x" * 100_000)))[0] > 0


async def test_a_thread_that_is_still_at_work_is_waited_for(reader: RequestParser) -> None:
    """A request that was cancelled may have left it reading: its memory is nobody else's meanwhile."""
    for more in range(3):
        await read(reader, turn(LONG + 2 * more))
    reader._aside_lock.acquire()
    jobs = cast("Jobs", reader._parse_thread)
    release = jobs.submit

    def first_done(work: Any, *arguments: Any) -> Future[Any]:
        if reader._aside_lock.locked():
            reader._aside_lock.release()
        return release(work, *arguments)

    jobs.submit = first_done  # type: ignore[method-assign]  # for this test
    assert (await read(reader, turn(LONG + 6)))[0] > 0


async def test_what_is_new_is_checked(reader: RequestParser) -> None:
    """Depth and numbers of parts hold for a conversation as a whole, of which most was checked before."""
    for more in range(3):
        await read(reader, turn(LONG + 2 * more))
    deep: object = "x"
    for _ in range(9):
        deep = [deep]
    with pytest.raises(Refusal, match="levels of JSON"):
        await read(reader, turn(LONG + 6, last=[{"type": "text", "text": "t", "more": deep}]))
    with pytest.raises(Refusal, match="objects and arrays"):
        await read(reader, turn(LONG + 6, last=[{"type": "text", "text": "t"}] * 300))
    await read(reader, turn(LONG + 6, last=[{"type": "text", "text": "t"}] * 200))
