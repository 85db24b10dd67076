"""Clients that are slow, many, or do not read: each is ended in time, and says to nobody else that it was there."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.client_timeouts import BODY_TIMEOUT, HEAD_TIMEOUT, IDLE, ClientTimer
from router.http.receiver import BETWEEN, BODY, HEAD
from tests.http.clients import LIMITS, LINE, play
from tests.http.looks import Looks
from tests.http.wire import RawEngine, connect, on_uvloop, post, proxied
from tests.support.examples import examples

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


async def page(url: str) -> str:
    """The router's metrics."""
    client = await connect(url)
    client.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "GET")
    answer = await client.answer()
    client.transport.close()
    return answer.body.decode()


@pytest.mark.promise("Half-open heads and silent connections are closed within `listen.head_timeout_s`.", "clients")
@given(began_s=st.floats(0, 1), stage=st.sampled_from([HEAD, BETWEEN]), drips=st.integers(0, 50))
def test_a_head_is_ended_by_its_limit(began_s: float, stage: int, drips: int) -> None:
    """Whenever between two looks a head begins, or a connection on which no byte ever comes: it is ended not after
    `head_timeout_s` and not before four fifths of it, however it drips."""
    patience, now_s = ClientTimer(), 0.0
    requests = 1 if stage == HEAD else 0
    if requests:
        patience.sends(now_s, LIMITS, BETWEEN, 0, 0)
    while True:
        now_s += LIMITS.sweep_s
        if now_s < began_s:
            continue
        if why := patience.sends(now_s, LIMITS, stage, requests, drips):
            break
    assert why == (HEAD_TIMEOUT if stage == HEAD else IDLE)
    assert 0.8 * LIMITS.head_timeout_s - LIMITS.sweep_s <= now_s - began_s <= LIMITS.head_timeout_s + LIMITS.sweep_s


@pytest.mark.promise("A body that arrives too slowly, or takes too long in all, is refused.", "clients")
@given(
    st.lists(st.tuples(st.floats(0.5, 2), st.integers(0, 4_000)), min_size=1, max_size=200), st.sampled_from([0, 1_024])
)
def test_a_body_must_come_at_its_rate(looks: list[tuple[float, int]], rate: int) -> None:
    """By an exact account: ten seconds' credit, one more for 1,024 bytes, at most 75; ended when it is spent, and not
    before. At any rate, a body of which nothing comes for 75 s is ended, and one of which something does is not."""
    limits = replace(LIMITS, body_bytes_per_s_min=rate)
    patience, now_s, body_bytes, credit_s = ClientTimer(), 0.0, 0, 10.0
    assert patience.sends(now_s, limits, BODY, 1, 0) == ""
    for took_s, came_bytes in looks:
        now_s, body_bytes = now_s + took_s, body_bytes + came_bytes
        credit_s = min(75.0, credit_s - took_s + (came_bytes / rate if rate else 75.0 * bool(came_bytes)))
        said = patience.sends(now_s, limits, BODY, 1, body_bytes)
        if abs(credit_s) > 1e-6:
            assert said == ("" if credit_s > 0 else BODY_TIMEOUT)
        if said:
            return


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=100))
def test_only_a_client_that_takes_nothing_is_ended(looks: list[tuple[int, int]]) -> None:
    """Bytes left, and none taken at any look, for longer than `send_timeout_s`: nothing else ends it."""
    patience, now_s, taken_bytes, since_s = ClientTimer(), 0.0, 0, None
    for left_bytes, took_bytes in looks:
        now_s, taken_bytes = now_s + 10.0, taken_bytes + took_bytes
        if not left_bytes:
            since_s = None
        elif took_bytes or since_s is None:
            since_s = now_s
        wanted = since_s is None or now_s - since_s <= LIMITS.send_timeout_s
        assert patience.reads(now_s, LIMITS, left_bytes, taken_bytes) == wanted


@pytest.mark.promise("Half-open heads and silent connections are closed within `listen.head_timeout_s`.", "clients")
@pytest.mark.inside
@on_uvloop
async def test_half_open_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of connections with half a head, dripping or silent, or without a byte: all are ended at the limit, with
    a 408 where something was said, while others are served; metrics say how many, and none is left."""
    count = examples(int(os.environ.get("WARMROUTE_HALF_OPEN", "300")))
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        looks = Looks(app.http._server)
        clients = [await connect(app.url) for _ in range(count)]
        for n, client in enumerate(clients):
            if n % 3:
                client.ask(b"POST /v1/messages HTTP/1.1\r\nHos", "POST")
        assert await page(app.url)  # by then all that was written has come
        served = 0
        await looks.look()
        while any(not client.lost.is_set() for client in clients):
            for client in clients[1::3]:
                if not client.lost.is_set() and not client.raw:
                    client.transport.write(b"t")
            good = await connect(app.url)
            good.ask(post())
            served += (await good.answer()).status == 200
            good.transport.close()
            await good.lost.wait()
            if served <= LIMITS.head_timeout_s:  # so many seconds pass, and no more: later clients are not half open
                await looks.look(1.0)
        assert served
        for n, client in enumerate(clients):
            assert [answer.status for answer in client.answers] == ([408] if n % 3 else [])
            if n % 3:
                assert json.loads(client.answers[0].body)["error"]["message"]
        text = await page(app.url)
        assert f'warmroute_connections_closed_total{{reason="head_timeout"}} {count - len(clients[::3])}.0' in text
        assert f'warmroute_connections_closed_total{{reason="idle"}} {len(clients[::3])}.0' in text
        while app.http._server.clients:
            await asyncio.sleep(0.01)  # the lingering of those that were refused
        assert app.http._server.connections == 0


@pytest.mark.promise("A body that arrives too slowly, or takes too long in all, is refused.", "clients")
@pytest.mark.inside
@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
@on_uvloop
async def test_slow_bodies(framing: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that comes too slowly is answered 408 in the dialect's words, one that comes slowly enough is served, and
    so is the request before it; extensions and trailers of chunks are no body."""
    chunked = b"chunked" in framing
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        looks = Looks(app.http._server)
        client = await connect(app.url)
        client.ask(post(), "POST")
        client.ask(LINE + framing + b"\r\n\r\n" + (b"5;" if chunked else b"{"), "POST")
        while not client.lost.is_set() and len(client.answers) < 2:
            client.transport.write(b"x")
            await asyncio.sleep(0)
            await looks.look(1.0)
        await client.answer(1)
        assert client.error is None
        assert [answer.status for answer in client.answers] == [200, 408]
        assert json.loads(client.answers[1].body)["type"] == "error"
        assert len(engine.seen) == 1
        body = b'{"model":"m","x":"' + b"x" * 20_000 + b'"}'
        client = await connect(app.url)
        client.ask(post(body=body)[: -len(body)], "POST")
        for end in range(500, len(body), 500):  # 1,250 bytes a second, for longer than there is credit at the start
            client.transport.write(body[end - 500 : end])
            while not any(each._receiver.reading_bytes >= end for each in app.http._server.clients):
                await asyncio.sleep(0)
            await looks.look(0.4)
        client.transport.write(body[len(body) // 500 * 500 :])
        assert (await client.answer()).status == 200
        client.transport.close()
