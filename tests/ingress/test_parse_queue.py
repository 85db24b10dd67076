"""Long bodies are read in turns, and only of tenants that are within their rates."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession

from router.core.types.requests import Priority
from router.http.request import Refusal
from router.ingress.parse_queue import ParseQueue
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = '{"type":"function","function":{"name":"a"}}'
SHORT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def many_tools(tools: int) -> bytes:
    """A chat request with so many tiny tools."""
    return b'{"model":"m","messages":[],"tools":[%b]}' % ",".join([TOOL] * tools).encode()


def long_chat(who: str, size_bytes: int = 300_000) -> bytes:
    """A chat request of about that size."""
    return json.dumps({"model": "m", "user": who, "messages": [{"role": "user", "content": "x" * size_bytes}]}).encode()


@pytest.mark.promise(
    "A tenant over its rate is refused at the head; its body is neither awaited nor parsed.", "tenants"
)
async def test_a_tenant_over_its_rate_has_nothing_parsed(
    client: ClientSession, engine: FakeEngine, tmp_path: Path
) -> None:
    """The rate is looked at before a body, long or short: what is over it is 429 though it is no JSON, and takes no
    turn on the thread that others wait for."""
    ring = Keyring(tmp_path, rate={"requests_per_min": 1}, spent={"tokens_per_min": 1})
    async with running(engine, **ring.settings) as app:
        for tenant in ("rate", "spent"):
            async with client.post(app.url + CHAT, json=SHORT, headers=ring.of(tenant)) as response:
                assert response.status == 200

        async def refused(tenant: str, body: bytes) -> None:
            async with client.post(app.url + CHAT, data=BytesIO(body), headers=ring.of(tenant)) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (429, "rate_limited")
                assert int(response.headers["Retry-After"]) > 1

        bodies = [b"{", many_tools(300_000)[:-1], *[many_tools(20_000)[:-1]] * 6]  # none of them is JSON
        await asyncio.gather(*(refused(tenant, body) for tenant in ("rate", "spent") for body in bodies))
        assert len(engine.seen) == 2


@pytest.mark.promise(
    "A tenant over its rate is refused at the head; its body is neither awaited nor parsed.", "tenants"
)
async def test_a_tenant_over_its_rate_need_not_send_its_body(engine: FakeEngine, tmp_path: Path) -> None:
    """Where the body comes behind its head, the answer to the head is 429 and the connection ends: nothing of the body
    is waited for or kept."""
    ring = Keyring(tmp_path, rate={"requests_per_min": 1})
    async with running(engine, **ring.settings) as app:
        host, port = app.url.removeprefix("http://").split(":")
        answers = list[bytes]()
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            (header,) = ring.of("rate").items()
            lines = f"Host: x\r\n{header[0]}: {header[1]}\r\nContent-Length: {len(json.dumps(SHORT))}"
            writer.write(f"POST {CHAT} HTTP/1.1\r\n{lines}\r\n\r\n".encode())
            if not answers:
                await writer.drain()
                while not app.http._server.clients or not next(iter(app.http._server.clients))._receiver.requests:
                    await asyncio.sleep(0)
                writer.write(json.dumps(SHORT).encode())
                answers.append(await reader.readuntil(b"\r\n"))
            else:
                answers.append(await reader.read())
                assert app.http._server.bodies.held_bytes == 0
            writer.close()
        assert [answer[9:12] for answer in answers] == [b"200", b"429"]
        assert b"retry-after:" in answers[1].lower()
        assert b"connection: close" in answers[1].lower()
        assert len(engine.seen) == 1


async def test_a_request_is_taken_from_the_rate_once(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """What was charged before its body was read is not charged again when it is placed; one that cannot be read has
    used the rate all the same."""
    ring = Keyring(tmp_path, rate={"requests_per_min": 4})
    async with running(engine, **ring.settings) as app:
        codes = list[int]()
        for body in (json.dumps(SHORT).encode(), long_chat("rate"), b"{", long_chat("rate"), b"{"):
            async with client.post(app.url + CHAT, data=BytesIO(body), headers=ring.of("rate")) as response:
                codes.append(response.status)
        assert codes == [200, 200, 400, 200, 429]


@pytest.mark.promise("No tenant starves another in the admission queue or the parse queue.", "tenants")
async def test_tenants_take_turns(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """A tenant that sends many long bodies waits for itself: another's single one is read next but one."""
    ring = Keyring(tmp_path, loud={}, quiet={})
    async with running(engine, **ring.settings) as app:
        turns = app.http.reader.turns
        await turns.take("somebody", Priority.NORMAL, 1)  # the thread is busy until all have come

        async def ask(tenant: str) -> int:
            async with client.post(app.url + CHAT, data=long_chat(tenant), headers=ring.of(tenant)) as response:
                return response.status

        loud = [asyncio.create_task(ask("loud")) for _ in range(12)]
        while turns.waiting_bytes < 12 * 300_000:
            await asyncio.sleep(0.01)
        quiet = asyncio.create_task(ask("quiet"))
        while turns.waiting_bytes < 13 * 300_000:
            await asyncio.sleep(0.01)
        turns.give_back()
        assert await asyncio.gather(quiet, *loud) == [200] * 13
    assert "quiet" in [seen.json["user"] for seen in engine.seen[:3]]


@pytest.mark.promise("The queue of long bodies that wait to be parsed is bounded in bytes and in time.", "clients")
async def test_what_waits_to_be_read_is_bounded_in_bytes(
    client: ClientSession, engine: FakeEngine, tmp_path: Path
) -> None:
    """Beyond `limits.parse_queue_bytes_max` bodies of the tenant that has most of them are turned away (429, with the
    time to come again), and no other tenant's."""
    ring = Keyring(tmp_path, loud={}, quiet={})
    more = {"limits__parse_queue_bytes_max": 1 << 20, "limits__body_bytes_max": 1 << 20}
    async with running(engine, **ring.settings, **more) as app:
        turns = app.http.reader.turns
        await turns.take("somebody", Priority.NORMAL, 1)

        async def ask(tenant: str) -> ClientResponse:
            async with client.post(app.url + CHAT, data=long_chat(tenant), headers=ring.of(tenant)) as response:
                await response.read()
                return response

        loud = [asyncio.create_task(ask("loud")) for _ in range(8)]
        await asyncio.wait(loud, return_when=asyncio.FIRST_COMPLETED)
        quiet = asyncio.create_task(ask("quiet"))
        while sum(task.done() for task in loud) < 6:  # three fit; a fourth makes room for the quiet one
            await asyncio.sleep(0.01)
        assert turns.waiting_bytes <= 1 << 20
        turns.give_back()
        assert (await quiet).status == 200
        answers = await asyncio.gather(*loud)
    assert Counter(answer.status for answer in answers) == {429: 6, 200: 2}
    assert all(answer.headers["Retry-After"] == "1" for answer in answers if answer.status == 429)


@pytest.mark.promise("The queue of long bodies that wait to be parsed is bounded in bytes and in time.", "clients")
async def test_nobody_waits_too_long_to_be_read(client: ClientSession, engine: FakeEngine) -> None:
    """After `limits.parse_queue_timeout_s` a body that still waits is turned away (429)."""
    async with running(engine, limits__parse_queue_timeout_s=0.05) as app:
        turns = app.http.reader.turns
        await turns.take("", Priority.NORMAL, 1)
        asked = asyncio.create_task(client.post(app.url + CHAT, data=long_chat("")))
        while not turns.waiting_bytes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.06)
        turns.give_back()
        async with await asked as response:
            assert (response.status, (await response.json())["error"]["code"]) == (429, "overloaded")
        async with client.post(app.url + CHAT, data=long_chat("")) as response:
            assert response.status == 200


@pytest.mark.promise("The queue of long bodies that wait to be parsed is bounded in bytes and in time.", "clients")
async def test_clients_that_leave_the_queue_hold_no_turn() -> None:
    """A request that is cancelled while it waits is gone, and one that is cancelled as its turn comes hands it on."""
    turns = ParseQueue(clock=lambda: 0.0)
    turns.bytes_max, turns.wait_s = 1_000, 10.0
    await turns.take("a", Priority.NORMAL, 1)
    waiting = [asyncio.create_task(turns.take(name, Priority.NORMAL, 100)) for name in "bcd"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert turns.waiting_bytes == 200
    turns.give_back()
    waiting[1].cancel()  # its turn has come, and it has not run since
    await waiting[2]
    turns.give_back()
    await turns.take("e", Priority.NORMAL, 1)  # the thread is free again
    with pytest.raises(Refusal, match="Too many long requests"):
        await turns.take("f", Priority.NORMAL, 1_001)


@pytest.mark.promise("JSON of more parts than `limits.json_parts_max` is refused before decoding.", "clients")
async def test_bodies_of_too_many_parts_are_not_decoded(client: ClientSession, engine: FakeEngine) -> None:
    """More than `limits.json_parts_max` tools, messages, parts, or whatever else objects and arrays are: 400 in words
    that name the limit, before anything is decoded; brackets in text are text."""
    bad = [
        many_tools(300_000),
        b'{"model":"m","messages":[%b]}' % b",".join([b'{"role":"user","content":"x"}'] * 100_000),
        b'{"model":"m","messages":[{"role":"user","content":[%b]}]}' % b",".join([b'{"type":"text"}'] * 100_000),
        b'{"model":"m","messages":[%b]}' % b",".join([b"[]"] * 1_000_000),
    ]
    text = json.dumps({**SHORT, "messages": [{"role": "user", "content": '{[,\\"' * 100_000}]}).encode()
    async with running(engine) as app:
        for body in bad:
            async with client.post(app.url + CHAT, data=BytesIO(body)) as response:
                said = (await response.json())["error"]
                assert (response.status, said["code"]) == (400, "too_many_parts")
                assert "limits.json_parts_max" in said["message"]
        for body in (text, many_tools(1_000)):
            async with client.post(app.url + CHAT, data=BytesIO(body)) as response:
                assert response.status == 200
        assert len(engine.seen) == 2


@pytest.mark.finding("2026-11-28/10")
@pytest.mark.promise("JSON of more values than `limits.json_values_max` is refused before it is decoded.", "clients")
async def test_bodies_of_too_many_values_are_not_decoded(client: ClientSession, engine: FakeEngine) -> None:
    """More ids or strings than `limits.json_values_max`, wherever they are, are 400 in words that name the limit,
    before anything is decoded; as many pass, and commas in text are text."""
    ids = b",".join([b"1"] * 400)
    bad = [
        (COMPLETIONS, b'{"model":"m","prompt":[%b]}' % b",".join([b"1"] * 1_100)),
        (COMPLETIONS, b'{"model":"m","prompt":[%b]}' % b",".join([b'"ab"'] * 1_100)),
        (COMPLETIONS, b'{"model":"m","prompt":[%b]}' % b",".join([b"[%b]" % ids] * 3)),
        (CHAT, b'{"model":"m","messages":[],"metadata":{%b}}' % b",".join([b'"a":0'] * 1_100)),
        ("/generate", b'{"input_ids":[%b]}' % b",".join([b"1"] * 1_100)),
    ]
    text = json.dumps({**SHORT, "messages": [{"role": "user", "content": "," * 100_000}]}).encode()
    async with running(engine, **{"limits.json_values_max": 1_000}) as app:
        for path, body in bad:
            async with client.post(app.url + path, data=BytesIO(body)) as response:
                said = await response.json()
                said = said.get("error", said)
                assert (response.status, said["code"]) == (400, "too_many_values")
                assert "limits.json_values_max" in said["message"]
        assert engine.seen == []
        for path, body in ((CHAT, text), (COMPLETIONS, b'{"model":"m","prompt":[%b,%b]}' % (ids, ids))):
            async with client.post(app.url + path, data=BytesIO(body)) as response:
                assert response.status == 200
