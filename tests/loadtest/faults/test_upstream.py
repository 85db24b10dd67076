"""The fault upstream does to a connection what the fault's name says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loadtest.common.answers import LAST_CHUNK, chunk
from loadtest.faults.judge import events, is_finished, verdict
from loadtest.faults.upstream import answers
from loadtest.faults.upstream.connection import EARLY, MID, Behaviour
from loadtest.faults.upstream.floods import FLOODS
from loadtest.faults.upstream.process import FaultyReplica
from tests.support.waiting import until


@asynccontextmanager
async def replica(**behaviour: Any) -> AsyncIterator[FaultyReplica]:
    """One, in this process."""
    made = FaultyReplica("r0", "127.0.0.1", 0)
    await made.open()
    made.state.behave(behaviour)
    try:
        yield made
    finally:
        made.refuse()
        for connection in tuple(made.state.connections):
            connection.abort()


async def ask(port: int, api: str = "chat", *, stream: bool = True, marks: str = "") -> tuple[bytes, str]:
    """Everything that came until a few moments passed without more, and how it ended: `end`, `reset`, `open`."""
    body = json.dumps(answers.APIS[api].request(f"[[id=7 {marks}]] why?", stream=stream)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {answers.APIS[api].path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    got, how, moments = b"", "", 0
    try:
        while not how:
            try:
                piece = await asyncio.wait_for(reader.read(65_536), 0.15)
            except TimeoutError:  # of which one is no sign: the machine may have stood still, with more to read
                moments += 1
                how = "open" if moments == 3 else ""
                continue
            got, moments = got + piece, 0
            how = "" if piece else "end"
    except ConnectionResetError:
        how = "reset"
    finally:
        writer.close()
    return got, how


def unchunked(raw: bytes) -> tuple[bytes, bool]:
    """A chunked body, as far as it came, and whether its last chunk did."""
    rest, body = raw.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            return body, True
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body, False


@pytest.mark.parametrize("api", answers.APIS)
async def test_healthy_streams_finish_and_are_what_the_judge_expects(api: str) -> None:
    """A stream that nothing is wrong with has one ending, and its bytes are those that rows compare with."""
    async with replica(token_s=0.0) as there:
        body, whole = unchunked((await ask(there.port, api))[0])
    assert whole
    assert body == b"".join(answers.APIS[api].stream(8))
    assert sum(is_finished(data) for _, data in events(body)[0]) == 1


@pytest.mark.parametrize("api", answers.APIS)
@pytest.mark.parametrize("fault", MID)
async def test_faults_in_mid_stream_leave_out_the_ending(api: str, fault: str) -> None:
    """Some tokens, no word of why it ended; and the connection ends as the name says."""
    async with replica(token_s=0.0) as there:
        raw, end = await ask(there.port, api, marks=f"fault={fault} after=3")
    body, last_chunk = unchunked(raw)
    assert body.startswith(b"".join((*answers.APIS[api].before, *answers.APIS[api].tokens(3))))
    assert verdict(api, body, "") == "silent"
    assert last_chunk == (fault in ("mid_eof", "mid_done", "mid_garbage"))
    assert end == {"mid_rst": "reset", "mid_fin": "end", "mid_cut": "end"}.get(fault, "open")


@pytest.mark.parametrize("fault", EARLY)
async def test_faults_before_the_first_byte(fault: str) -> None:
    """No token comes; connections end, hang or carry the status of the name."""
    async with replica() as there:
        raw, end = await ask(there.port, marks=f"fault={fault}")
    assert b"data:" not in raw
    assert end == {"rst": "reset", "fin": "end", "garbage_http": "end"}.get(fault, "open")
    if fault.isdigit():
        assert raw.startswith(f"HTTP/1.1 {fault} ".encode())
        assert (b"retry-after: 1\r\n" in raw) == (fault in ("429", "503"))
    else:
        assert raw[:8] == {"hang_headers": b"HTTP/1.1", "garbage_http": b"\x00\xff\x13 what"}.get(fault, b"")


async def test_a_marker_is_for_the_replica_that_it_names() -> None:
    """`at=r1` leaves r0 as it is; the request is kept with its id."""
    async with replica() as there:
        raw, _ = await ask(there.port, marks="fault=rst at=r1", stream=False)
    assert raw.startswith(b"HTTP/1.1 200")
    assert [(record["id"], record["fault"]) for record in there.state.seen] == [("7", "")]


async def test_a_count_of_faults_runs_out() -> None:
    """The fault is for so many requests, then all is well."""
    async with replica(fault="503", count=2) as there:
        found = [(await ask(there.port, stream=False))[0][9:12] for _ in range(3)]
    assert found == [b"503", b"503", b"200"]


async def test_who_leaves_is_written_down() -> None:
    """The time at which a client left is kept, so that rows can say how soon the replica heard of it."""
    async with replica(fault="hang") as there:
        await ask(there.port)
        async with asyncio.timeout(60):
            while there.state.seen[0]["closed_s"] is None:
                await asyncio.sleep(0.01)
        assert there.state.running == there.state.waiting == 0
        assert there.state.seen[0]["closed_s"] >= there.state.seen[0]["came_s"]


async def test_refusing_leaves_running_answers_alone() -> None:
    """A closed listener cuts nobody off, and opens again on the same port."""
    async with replica(tokens=20, token_s=0.01) as there:
        asked = asyncio.create_task(ask(there.port))
        await until(lambda: there.state.running)
        there.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", there.port)
        assert verdict("chat", unchunked((await asked)[0])[0], "") == "invented"  # that is: finished
        await there.open()
        assert (await ask(there.port, stream=False))[0].startswith(b"HTTP/1.1 200")


async def test_slots_make_others_wait() -> None:
    """With one slot, two requests take twice as long and the metrics say that one waits."""
    async with replica(slots=1, tokens=10, token_s=0.01) as there:
        asked = [asyncio.create_task(ask(there.port, stream=False)) for _ in range(2)]
        await until(lambda: (there.state.running, there.state.waiting) == (1, 1))
        assert [(await each)[0][9:12] for each in asked] == [b"200", b"200"]
    assert Behaviour().slots == 0


async def test_bodies_in_chunks_are_read() -> None:
    """A router that sends chunks is understood."""
    async with replica() as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        body = json.dumps(answers.APIS["chat"].request("x", stream=False)).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(chunk(body[:9]) + chunk(body[9:]) + LAST_CHUNK)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("kind", FLOODS)
async def test_floods_are_what_they_say(kind: str) -> None:
    """At least as many bytes as were asked for, whole in the end: short events, one event, or one answer."""
    async with replica() as there:
        raw, _ = await ask(there.port, marks=f"flood={kind} flood_bytes=300000", stream=kind != "answer")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert len(body) >= 300_000
    if kind == "answer":
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["object"] == "list"
        return
    body, whole = unchunked(raw)
    found = [data for _, data in events(body)[0]]
    assert whole
    assert found[-1] == b"[DONE]"
    assert all(isinstance(data, dict) for data in found[:-1])
    assert (len(found) < 10) == (kind == "one_event")
