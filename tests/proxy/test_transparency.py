"""Through a router an engine's answer is what it is without one: status, headers, bytes, and when the first come.

The exceptions are those of docs/reference/endpoints.md ("What passes"). Answers are those of the zoo
(loadtest/fake_engine/zoo), and some of kinds that no member has, in every framing, cut at random places. An engine
sends its first piece and then nothing until the client has seen it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import pytest
import uvloop
from aiohttp import ClientSession
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from loadtest.fake_engine.command import Engines, EngineSettings
from loadtest.fake_engine.zoo.members import MEMBERS as ZOO
from tests.proxy.transparent import AUDIO, JSON, WAIT_S, Asked, Bench, Case, asking, headers, recorded, requests
from tests.support.examples import examples
from tests.support.fakes import running

MEMBERS = ("vllm-dense", "vllm-usage", "sglang", "sglang-reasoning", "sglang-usage")
STREAMED, ANY_FRAMING = ("chunked", "eof"), ("length", "chunked", "eof")
ERRORS = (400, 401, 403, 404, 409, 413, 415, 418, 422, 500, 501)
OTHER_KINDS = ("application/x-ndjson", "text/plain; charset=utf-8", "application/octet-stream", None)

TEXT = re.compile(rb'"(?:content|text|delta|reasoning_content|audio)":"([^"]+)"')
LIVE = [name for name in ZOO if name not in ("vllm-asleep", "sglang-queue")]  # one never answers, one at once


@dataclass(frozen=True)
class Row:
    """Cases of one kind."""

    streams: tuple[bytes, ...]
    """Values of `stream` in the request."""
    framings: tuple[str, ...]
    of: Callable[[Case], bool]
    """Whether an answer of the zoo is one of these."""
    kinds: tuple[str | None, ...] = ()
    """Content types in place of the answer's."""
    statuses: tuple[int, ...] = ()
    """Statuses in place of the answer's."""
    longer: bool = False
    """Whether the body is made longer than what is held."""


def _events(case: Case) -> bool:
    return case.events and case.asked.path not in AUDIO


def _heard(case: Case) -> bool:
    return case.events and case.asked.path in AUDIO


def _whole(case: Case) -> bool:
    return case.kind is not None and case.kind.startswith(JSON)


def _good(case: Case) -> bool:
    return _whole(case) and case.status < 400  # errors are held: they say whether another replica may be tried


ROWS = {
    "events that were asked for": Row((b"true",), ANY_FRAMING, _events),
    "events asked for in other words": Row((b'"true"', b"1", b'"on"'), ANY_FRAMING, _events),
    "events that were not asked for": Row((b"", b"false"), ANY_FRAMING, _events),
    "events of sound": Row((b"true",), ANY_FRAMING, _heard),
    "sound": Row((b"true",), STREAMED, lambda case: case.kind == "audio/pcm"),
    "whole sound": Row((b"",), ("length",), lambda case: case.kind == "audio/wav"),
    "whole JSON": Row((b"",), ("length",), _whole),
    "errors": Row((b"", b"true"), ("length",), _whole, statuses=ERRORS),
    "long JSON": Row((b"",), ("length",), _whole, longer=True),
    "JSON without a length": Row((b"",), STREAMED, _good),
    "other kinds": Row((b"",), STREAMED, _good, kinds=OTHER_KINDS),
}


@pytest.fixture(scope="module")
def zoo() -> list[Case]:
    """Answers of the zoo."""
    return asyncio.run(recorded(*MEMBERS))


def _cases(row: Row, zoo: Sequence[Case]) -> st.SearchStrategy[Case]:
    answers = [case for case in zoo if row.of(case)]
    assert answers

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        case = draw(st.sampled_from(answers))
        body = case.body + b" " * 4_000 if row.longer else case.body
        return replace(
            case,
            asked=asking(case.asked, draw(st.sampled_from(row.streams))),
            framing=draw(st.sampled_from(row.framings)),
            kind=draw(st.sampled_from(row.kinds or (case.kind,))),
            status=draw(st.sampled_from(row.statuses or (case.status,))),
            body=body,
            seed=draw(st.integers(0, 1 << 20)),
        )

    return drawn()


async def _hold(bench: Bench, case: Case) -> None:
    """Both answers are the same."""
    direct = await bench.ask(case, bench.engine.url)
    asked = len(bench.engine.seen)
    through = await bench.ask(case, bench.app.url, WAIT_S)
    assert through.answered.status == direct.answered.status == case.status
    assert through.answered.body == direct.answered.body == case.body
    assert headers(through) == headers(direct)
    assert [body for _, body in bench.engine.seen[asked:]] == [case.asked.body]  # once, and as it is


@pytest.mark.parametrize("name", ROWS)
def test_the_same_with_a_router(name: str, zoo: list[Case]) -> None:
    """Status, headers, bytes and their order, and the time of the first piece."""
    row = ROWS[name]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        bench = runner.run(Bench().start(api__passthrough=("/v1/audio/speech", "/v1/audio/transcriptions")))

        @settings(
            max_examples=examples(120),
            derandomize=True,
            database=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=_cases(row, zoo))
        def holds(case: Case) -> None:
            runner.run(_hold(bench, case))

        try:
            holds()
        finally:
            runner.run(bench.stop())


@pytest.mark.parametrize("name", LIVE)
async def test_a_member_itself(name: str) -> None:
    """A member of the zoo behind a router, which may ask it for usage: clients have what they have without. How many
    tokens an event has depends on the time, so their texts are joined."""
    member = EngineSettings(replicas=1, port=0, model="m", time_scale=1000.0, member=ZOO[name])
    async with Engines(member) as engines, running(engines.urls[0], api__passthrough=AUDIO) as app:
        for asked in requests():
            for stream in (b"true", b""):
                told = asking(asked, stream)
                got = []
                for url in (engines.urls[0], engines.urls[0], app.url):  # the first one fills the cache
                    async with ClientSession(url) as session:
                        got.append(await _said(session, told))
                assert got[2] == got[1], told


async def _said(session: ClientSession, asked: Asked) -> tuple[object, ...]:
    """Status, content type, text, and each event without its text, those of one kind behind each other as one."""
    headers = {"Content-Type": asked.kind, "X-Request-Id": "one"}
    async with session.post(asked.path, data=asked.body, headers=headers) as response:
        body = re.sub(rb'"(created|created_at)":\d+|msg_\d+|"sequence_number":\d+', b"", await response.read())
        kind = response.headers["Content-Type"]
        if not kind.startswith("text/event-stream"):
            return response.status, kind, body
    text = b"".join(TEXT.findall(body))
    shapes = [each for each, _ in groupby(TEXT.sub(b"", body).split(b"\n\n"))]
    return response.status, kind, text, shapes
