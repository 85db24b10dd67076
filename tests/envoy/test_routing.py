"""Requests through a real Envoy go where the picker says, in every mode, and the answers are whole."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from loadtest.common.envoy import DESTINATION, EnvoyMode
from tests.envoy.envoy import DUPLEX, DUPLEX_IN, MODES, behind, chat
from tests.extproc.asking import CHAT
from tests.support.fakes import USAGE, events, half_then_waits, mute
from tests.support.figures import figure
from tests.support.waiting import until


@pytest.mark.parametrize("name", MODES)
async def test_conversations_stay_where_they_are(tmp_path: Path, client: aiohttp.ClientSession, name: str) -> None:
    """Turns of each of nine conversations go to one replica, and conversations are spread; streams come whole. Where
    the picker does not see bodies they are spread only; where it is told of no end of an answer, most turns stay."""
    more = {"extproc.fallbacks_max": 0} if MODES[name].named else {}
    async with behind(tmp_path, mode=MODES[name], **more) as (envoy, app, engines):
        for _ in range(4):
            for n in range(9):
                body = chat(f"{n} " + f"word{n} " * 400, stream=True)
                async with client.post(envoy.url + CHAT, json=body) as answer:
                    assert answer.status == 200
                    assert await answer.read() == b"".join(events())
        seen = {each.url: Counter(got.json["messages"][0]["content"][:2] for got in each.seen) for each in engines}
        await until(lambda: not any(member.leases for member in app.router.members) or name == DUPLEX_IN)
    together = [max(each[f"{n} "] for each in seen.values()) for n in range(9)]
    assert sum(map(sum, (each.values() for each in seen.values()))) == 36
    if name == DUPLEX_IN:  # No end of an answer is told: leases stay open, and load moves some of the turns.
        assert sum(together) > 24, seen  # By chance it would be about 20.
    elif name != "headers":
        assert together == [4] * 9, seen
    assert len([each for each in seen.values() if each]) > 1


async def test_a_stream_comes_as_it_is_made(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """Events pass at once: half of a stream is with the client while the engine waits, and its lease is open."""
    async with behind(tmp_path, count=1) as (envoy, app, (engine,)):
        engine.script.append(half_then_waits)
        (member,) = app.router.members
        async with client.post(envoy.url + CHAT, json=chat("x", stream=True)) as answer:
            got = await answer.content.readexactly(len(b"".join(events()[:2])))
            assert got == b"".join(events()[:2])
            assert len(member.leases) == 1
            assert answer.headers["x-warmroute-grade"] == "unseen"
            assert answer.headers["x-warmroute-replica"] == engine.url
            engine.go_on.set()
            assert got + await answer.read() == b"".join(events())
        await until(lambda: not member.leases)
        assert member.evidence.unobserved_responses == 1


@pytest.mark.figures
async def test_the_lease_is_back_when_the_client_leaves(tmp_path: Path) -> None:
    """At once, while the engine works and while a stream is on its way."""
    async with behind(tmp_path, count=1) as (envoy, app, (engine,)):
        (member,) = app.router.members
        for reply in (mute, half_then_waits):
            engine.script.append(reply)
            engine.at_work.clear()
            async with aiohttp.ClientSession() as leaving:
                task = asyncio.create_task(leaving.post(envoy.url + CHAT, json=chat("x", stream=True)))
                await engine.at_work.wait()
                assert len(member.leases) == 1
                if reply is half_then_waits:
                    (await task).close()
                left_s = time.monotonic()
                task.cancel()
                await until(lambda: not member.leases)
                figure("gateway_lease_back_behind_envoy_ms", 50.0, (time.monotonic() - left_s) * 1e3)
            assert app.extproc.in_flight == 0


async def test_a_body_of_six_megabytes_passes(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """Whole, buffered and in full duplex; one beyond `limits.body_bytes_max` is refused in words."""
    text = "word " * 1_250_000
    for mode in (EnvoyMode(), MODES[DUPLEX]):
        limits = {"limits.body_bytes_max": 8 << 20}
        async with behind(tmp_path, mode=mode, **limits) as (envoy, _, engines):
            async with client.post(envoy.url + CHAT, data=io.BytesIO(json.dumps(chat(text)).encode())) as answer:
                assert answer.status == 200
            (got,) = [got for each in engines for got in each.seen]
            assert got.json["messages"][0]["content"] == text
            longer = io.BytesIO(json.dumps(chat(text * 2)).encode())
            async with client.post(envoy.url + CHAT, data=longer) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (413, "body_too_large")


async def test_what_is_spliced_reaches_the_engine(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """The rewritten model is in the body that the engine gets, whose length is right, buffered and in full duplex."""
    headers = {"x-llm-d-model-name-rewrite": "m", "x-warmroute-tenant": "acme"}
    for mode in (EnvoyMode(), MODES[DUPLEX]):
        async with behind(tmp_path, mode=mode) as (envoy, _, engines):
            async with client.post(envoy.url + CHAT, json=chat("x") | {"model": "other"}, headers=headers) as answer:
                assert answer.status == 200
            (got,) = [got for each in engines for got in each.seen]
            assert got.json["model"] == "m"
            assert "x-warmroute-tenant" not in got.headers
            assert int(got.headers.get("content-length", len(got.body))) == len(got.body)  # or in chunks


@pytest.mark.parametrize("name", ["cheap", "named"])
async def test_a_forged_destination_goes_nowhere(tmp_path: Path, client: aiohttp.ClientSession, name: str) -> None:
    """A client that names an endpoint, even Envoy's own admin port, is served by a replica; without a picker, too, at a
    gateway that fails open, and if the gateway connects to any address that the header names."""
    mode = replace(MODES[name], fail_open=True)
    async with behind(tmp_path, mode=mode, **{"extproc.fallbacks_max": 0}) as (envoy, app, engines):
        forged = {DESTINATION: f"127.0.0.1:{envoy.admin_port}"}
        for _ in range(3):
            async with client.post(envoy.url + CHAT, json=chat("x"), headers=forged) as answer:
                assert (await answer.json())["id"] == "x"
        await app.extproc.__aexit__(None, None, None)
        for _ in range(3):
            async with client.post(envoy.url + CHAT, json=chat("x"), headers=forged) as answer:
                assert (await answer.json())["id"] == "x"
        assert sum(len(each.seen) for each in engines) == 6
        assert all(DESTINATION not in got.headers or got.headers[DESTINATION] != forged[DESTINATION]
                   for each in engines for got in each.seen)  # fmt: skip


async def test_answers_are_asked_for_and_learned_from(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """With `extproc.response_sample_ratio` the gateway is asked to show answers that it does not show: streams stay
    whole, and first tokens and usage are known. Where it may not be asked (`allow_mode_override`) nothing changes."""
    body = chat("word " * 800, stream=True, stream_options={"include_usage": True})
    for allowed in (True, False):
        mode = EnvoyMode(override=allowed)
        async with behind(tmp_path, count=1, mode=mode, **{"extproc.response_sample_ratio": 1.0}) as (envoy, app, _):
            for _ in range(12):
                async with client.post(envoy.url + CHAT, json=body) as answer:
                    assert await answer.read() == b"".join(events(usage=USAGE))
            await until(lambda app=app: len(app.control.history.recent) == 12)
            ttfts = [record.times.ttft_s for record in app.control.history.recent]
            assert sum(ttft is not None for ttft in ttfts) == (12 if allowed else 0)
            assert app.extproc._parts.answers_come is allowed
