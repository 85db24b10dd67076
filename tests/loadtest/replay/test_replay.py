"""Promises of the replay, against a small OpenAI-compatible server on port 0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from loadtest.common.client import ReplayError, StreamScan
from loadtest.common.traces import Trace, read_trace
from loadtest.replay.command import main
from loadtest.replay.run import ReplaySettings, arrivals, run_replay

ROLE_EVENT = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CONTENT_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"abcd"}}]}\n\n'
DONE = b"data: [DONE]\n\n"

Behaviour = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@dataclass
class FakeEngine:
    """Answers every prompt it has seen before as wholly cached, and counts like vLLM."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    active: int = 0
    active_max: int = 0
    looked_up: int = 0
    found: int = 0
    status: int = 200
    hang: bool = False
    cut: bool = False
    prompts: set[str] = field(default_factory=set)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """One streamed answer of five tokens."""
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        self.active += 1
        self.active_max = max(self.active, self.active_max)
        try:
            return await self._stream(request, body)
        finally:
            self.active -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = body.get("prompt") or "".join(message["content"] for message in body["messages"])
        tokens = len(prompt) // 4
        cached = tokens if prompt in self.prompts else 0
        self.prompts.add(prompt)
        self.looked_up += tokens
        self.found += cached
        response = web.StreamResponse(headers={"x-warmroute-replica": "r1"})
        await response.prepare(request)
        await response.write(ROLE_EVENT)
        if self.hang:
            await asyncio.Event().wait()
        await response.write(CONTENT_EVENT)
        if self.cut:
            return response
        usage = {"prompt_tokens": tokens, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": cached}}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n" + DONE)
        return response

    async def metrics(self, request: web.Request) -> web.Response:
        """vLLM's two counters, with labels and a neighbour that must not be mistaken for them."""
        text = (
            f'vllm:prefix_cache_queries_total{{engine="0",model_name="m m"}} {float(self.looked_up)}\n'
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="m m"}} {float(self.found)}\n'
            'vllm:prefix_cache_hits_created{engine="0"} 1.7e9\n'
        )
        return web.Response(text=text)

    async def models(self, request: web.Request) -> web.Response:
        """One model."""
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """The fake on a free port."""
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/chat/completions", engine.complete)
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_get("/v1/models", engine.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """A fake engine that serves."""
    async with serving(FakeEngine()) as fake:
        yield fake


def _open_trace(folder: Path, rows: list[tuple[int, int, list[int]]]) -> Path:
    path = folder / "open.jsonl"
    keys = ("timestamp", "input_length", "hash_ids")
    lines = [json.dumps(dict(zip(keys, row, strict=True), output_length=5)) for row in rows]
    path.write_text("\n".join(lines))
    return path


def _session_trace(folder: Path, sessions: int, turns: int) -> Trace:
    path = folder / "sessions.jsonl"
    rows = [
        {"s": f"s{s}", "t": t, "in": 64 * (t + 1), "out": 5, "h": [[1, t + 1]], "think": 3600.0}
        for s in range(sessions)
        for t in range(turns)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return read_trace(path)


async def test_hits_are_split_into_genuine_and_replay(engine: FakeEngine, tmp_path: Path) -> None:
    """The hit rate is the engines' own, and what a repeated prompt earned is told apart."""
    trace = read_trace(_open_trace(tmp_path, [(0, 100, [1]), (0, 100, [2]), (0, 200, [1])]))
    engine.prompts.add(trace.sessions[1].requests[0].text())
    settings = ReplaySettings(url=engine.url, replicas=(engine.url,), workload="w", policy="p")
    first = await run_replay(trace, settings)
    again = read_trace(_open_trace(tmp_path, [(0, 300, [3]), (50, 300, [3])]))
    second = await run_replay(again, settings)

    assert (first.requests, first.errors, first.rejected) == (3, 0, 0)
    assert first.token_hit_rate == first.genuine_hit_rate == 0.25
    assert (second.token_hit_rate, second.genuine_hit_rate, second.replay_hit_rate) == (0.5, 0.0, 0.5)
    assert (second.hit_rate_source, second.imbalance, second.requests_by_replica) == ("engines", 1.0, {"r1": 2})


async def test_without_replicas_usage_counts(engine: FakeEngine, tmp_path: Path) -> None:
    """Where no replica is given, the hit rate is what answers reported, and the row says so."""
    trace = read_trace(_open_trace(tmp_path, [(0, 100, [1]), (50, 100, [1])]))

    row = await run_replay(trace, ReplaySettings(url=engine.url))

    assert (row.hit_rate_source, row.token_hit_rate) == ("usage", 0.5)
    assert row.imbalance is None


async def test_times_are_simulated_seconds(engine: FakeEngine, tmp_path: Path) -> None:
    """With a time scale the trace runs that much faster, and what is measured is scaled back."""
    trace = read_trace(_open_trace(tmp_path, [(0, 100, [1]), (100_000, 100, [1])]))

    row = await run_replay(trace, ReplaySettings(url=engine.url, time_scale=1000, speed=2))

    assert row.duration_s is not None
    assert 50 <= row.duration_s < 50_000  # which is what it would be at the trace's own pace
    assert row.load == pytest.approx(2 / 50)


async def test_closed_loop_holds_its_sessions(engine: FakeEngine, tmp_path: Path) -> None:
    """At most so many sessions are active, each with one request, until all are through; thinking is capped."""
    trace = _session_trace(tmp_path, sessions=5, turns=3)
    settings = ReplaySettings(url=engine.url, sessions_active=2, think_max_s=0.01)

    row = await run_replay(trace, settings)

    assert 15 == row.requests == len(engine.bodies)
    assert engine.active_max <= 2
    assert (row.load, row.load_unit) == (2, "sessions")


async def test_requests_max_ends_the_run(engine: FakeEngine, tmp_path: Path) -> None:
    """No more than the wanted number of requests is sent, whatever the sessions still hold."""
    trace = _session_trace(tmp_path, sessions=5, turns=3)

    row = await run_replay(trace, ReplaySettings(url=engine.url, requests_max=7, think_max_s=0))

    assert 7 == row.requests == len(engine.bodies)


async def test_turns_extend_the_messages_before(engine: FakeEngine, tmp_path: Path) -> None:
    """A session's chat requests carry its earlier messages unchanged, all of them the user's."""
    trace = _session_trace(tmp_path, sessions=1, turns=3)

    await run_replay(trace, ReplaySettings(url=engine.url, think_max_s=0))

    turns = [body["messages"] for body in engine.bodies]
    assert [len(messages) for messages in turns] == [1, 2, 3]
    assert turns[1] == turns[2][:2]
    assert {"user"} == {message["role"] for messages in turns for message in messages}
    assert engine.bodies[0]["stream_options"] == {"include_usage": True}
    assert (engine.bodies[0]["min_tokens"], engine.bodies[0]["model"]) == (5, "m")


async def test_max_tokens_say_nothing_of_an_answer(engine: FakeEngine, tmp_path: Path) -> None:
    """A session's requests have one of the limits that clients use, and the same one; other limits can be had."""
    trace = _session_trace(tmp_path, sessions=30, turns=2)

    await run_replay(trace, ReplaySettings(url=engine.url, think_max_s=0, sessions_active=1))
    limits = [body.get("max_tokens") for body in engine.bodies]
    await run_replay(trace, ReplaySettings(url=engine.url, think_max_s=0, answer_limits=(700,)))

    assert set(limits) == {None, 4_096, 8_192}
    assert limits[::2] == limits[1::2]
    assert {body["max_tokens"] for body in engine.bodies[60:]} == {700}
    assert {body["min_tokens"] for body in engine.bodies} == {5}


@pytest.mark.parametrize(
    ("how", "fields"), [("foreknowledge", {"min_tokens": 5}), ("ignore_eos", {"ignore_eos": True})]
)
async def test_lengths_as_limits(engine: FakeEngine, tmp_path: Path, how: str, fields: dict[str, object]) -> None:
    """With foreknowledge, and where a real engine is to go on to the recorded length, the limit is the length."""
    await run_replay(_session_trace(tmp_path, 3, 1), ReplaySettings(url=engine.url, think_max_s=0, **{how: True}))  # type: ignore[arg-type]

    names = ("max_tokens", "min_tokens", "ignore_eos")
    assert len(engine.bodies) == 3
    assert all({n: b[n] for n in names if n in b} == {"max_tokens": 5, **fields} for b in engine.bodies)


async def test_completions_send_the_whole_prompt(engine: FakeEngine, tmp_path: Path) -> None:
    """On the completions endpoint the prompt is one string."""
    trace = read_trace(_open_trace(tmp_path, [(0, 600, [1, 2])]))

    row = await run_replay(trace, ReplaySettings(url=engine.url, endpoint="completions"))

    assert len(engine.bodies[0]["prompt"]) == 2400
    assert row.errors == 0


@pytest.mark.parametrize(
    ("broken", "kind", "rejected"),
    [
        ({"status": 503}, "http_503", 1),
        ({"status": 429}, "http_429", 1),
        ({"status": 500}, "http_500", 0),
        ({"hang": True}, "timeout", 0),
        ({"cut": True}, "cut", 0),
    ],
)
async def test_failures_cost_the_whole_timeout(
    engine: FakeEngine, tmp_path: Path, broken: dict[str, Any], kind: str, rejected: int
) -> None:
    """A request that is refused, fails or never ends counts as the client's timeout, and by its kind."""
    for name, value in broken.items():
        setattr(engine, name, value)
    trace = read_trace(_open_trace(tmp_path, [(0, 100, [1])]))

    scale = 100 if kind == "timeout" else 0.2  # who is answered has a hundred seconds for it
    row = await run_replay(trace, ReplaySettings(url=engine.url, time_scale=scale, timeout_s=20))

    assert (1, 1 - rejected, rejected) == (row.requests, row.errors, row.rejected)
    assert {kind: 1} == row.errors_by_kind
    assert (row.ttft_p50_s, row.ttft_p99_s, row.e2e_p99_s) == (20, 20, 20)


async def test_goodput_counts_what_came_in_time(engine: FakeEngine, tmp_path: Path) -> None:
    """Goodput is requests a second whose first token came within the limit."""
    trace = read_trace(_open_trace(tmp_path, [(0, 100, [1]), (10, 100, [1])]))

    none = await run_replay(trace, ReplaySettings(url=engine.url, ttft_limit_s=1e-9))
    both = await run_replay(trace, ReplaySettings(url=engine.url, ttft_limit_s=1e9))

    assert none.goodput == 0
    assert both.duration_s is not None
    assert both.goodput == pytest.approx(2 / both.duration_s)


async def test_unreachable_target_is_said_plainly(tmp_path: Path) -> None:
    """A run that cannot start is a ReplayError naming the URL."""
    trace = read_trace(_open_trace(tmp_path, [(0, 100, [1])]))

    with pytest.raises(ReplayError, match=r"http://127\.0\.0\.1:9/v1/models"):
        await run_replay(trace, ReplaySettings(url="http://127.0.0.1:9"))


def test_arrivals_are_as_recorded_or_spread(tmp_path: Path) -> None:
    """Requests come at their recorded times and in their order; with `spread_s` each comes later by up to that, not all
    by the same, in the order of the new times, and likewise with the same seed."""
    trace = read_trace(_open_trace(tmp_path, [(3_000 * (n // 4), 100, [n]) for n in range(40)]))
    settings = ReplaySettings(url="http://x", spread_s=3.0)

    recorded = arrivals(trace.sessions, replace(settings, spread_s=0.0))
    spread = arrivals(trace.sessions, settings)

    assert recorded == [(each.requests[0].at_s, each) for each in trace.sessions]
    assert [at_s for at_s, _ in spread] == sorted(at_s for at_s, _ in spread)
    assert len({at_s for at_s, _ in spread}) == len(trace.sessions)
    assert all(0 <= at_s - each.requests[0].at_s <= 3.0 for at_s, each in spread)
    assert spread == arrivals(trace.sessions, settings) != arrivals(trace.sessions, replace(settings, seed=2))


async def test_sessions_have_no_open_loop(tmp_path: Path) -> None:
    """Sessions without a common clock are refused in open loop."""
    with pytest.raises(ReplayError, match="closed loop"):
        await run_replay(_session_trace(tmp_path, 1, 1), ReplaySettings(url="http://x", mode="open"))


@given(st.data())
def test_stream_scan_does_not_mind_how_bytes_are_cut(data: st.DataObject) -> None:
    """However a stream is cut into chunks, the first content and the usage are found."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
    stream = ROLE_EVENT + CONTENT_EVENT * 200 + usage + DONE
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20)))
    scan = StreamScan()
    for now, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(stream)], strict=True)):
        scan.feed(stream[start:end], now)

    content = len(ROLE_EVENT) + CONTENT_EVENT.index(b"abcd") + 1
    assert sum(cut < content for cut in cuts) == scan.first_content_at
    assert (scan.usage().prompt_tokens, scan.usage().completion_tokens, scan.failure) == (9, 3, "")


def test_error_event_is_a_failure() -> None:
    """A stream that ends in an error event has failed, `[DONE]` or not."""
    scan = StreamScan()
    scan.feed(CONTENT_EVENT + b'data: {"error": {"message": "boom"}}\n\n' + DONE, 1.0)

    assert scan.failure == "error_event"


async def test_command_writes_json_and_checks(engine: FakeEngine, tmp_path: Path) -> None:
    """The command writes its row, exits 0, and exits 1 when a stated figure is missed."""
    trace = _open_trace(tmp_path, [(0, 100, [1])])
    arguments = ["--url", engine.url, "--trace", str(trace), "--json", str(tmp_path / "out.json")]

    kept = await asyncio.to_thread(main, [*arguments, "--check", "errors<=0"])
    missed = await asyncio.to_thread(main, [*arguments, "--check", "token_hit_rate>=1.1"])

    document = json.loads((tmp_path / "out.json").read_text())
    assert (kept, missed) == (0, 1)
    assert {"command", "commit", "machine", "date", "rows"} == set(document)
    assert (document["rows"][0]["requests"], document["rows"][0]["ok"]) == (1, False)


def test_command_refuses_a_bad_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace that cannot be read ends the command with 2 and one line."""
    path = tmp_path / "bad.jsonl"
    path.write_text("nonsense")

    assert main(["--url", "http://x", "--trace", str(path)]) == 2
    assert "bad.jsonl:1" in capsys.readouterr().err
