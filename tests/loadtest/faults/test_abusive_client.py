"""The hostile tenant of the matrix of faults does what its way says, and its rows judge what others saw."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from loadtest.common import rivals
from loadtest.faults import abusive_client
from loadtest.faults.bench import Bench, FaultAnswer, Scale
from loadtest.faults.cases import neighbours, tenants
from loadtest.faults.cases.neighbours import Seen
from loadtest.faults.hostile_store import FORGED_BYTES, NOTHING, HostileStore, bulk
from loadtest.faults.upstream import answers
from loadtest.faults.upstream.floods import FLOODS
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring

EXPECTED: dict[str, set[int]] = {
    "bytes": {200},
    "parts": {200, 400},
    "connections": {200},
    "sessions": {200},
    "slow bodies": set(),
    "many models": {404},
    "tools": {200},
    "a used-up rate": {429},
    "ids": {200},
    "strings": {200},
    "cancels": {200},
    "deadlines": {200},
    **{f"flood of {kind}": {200} for kind in FLOODS},
}


@pytest.mark.parametrize("way", {**abusive_client.WAYS, **abusive_client.BESIDE})
async def test_each_way_is_what_it_says(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are answered as such requests are, others' too, and it ends by itself."""
    small = {"CONNECTIONS": 20, "SLOW_BODIES": 10, "BODY_BYTES": 1 << 20, "PARTS_FEW": 1_000, "PARTS_MANY": 70_000}
    for name, value in (small | {"TINY_TOOLS": 20_000, "IDS": 1_000, "STRINGS": 1_000}).items():
        monkeypatch.setattr(abusive_client, name, value)
    rate: dict[str, Any] = {"requests_per_min": 1} if way == "a used-up rate" else {}
    ring = Keyring(tmp_path, bad=rate, good={})
    async with FakeEngine(models=("fault-model", "flood-model")) as engine, running(engine, **ring.settings) as app:
        port = int(app.url.rsplit(":", 1)[1])
        if rate:
            assert 200 in await abusive_client.run("sessions", port, ring.keys["bad"], 0.2)
        became = await abusive_client.run(way, port, ring.keys["bad"], 0.5)
        assert set(became) == EXPECTED[way]
        assert set(await abusive_client.run("sessions", port, ring.keys["good"], 0.1)) == {200}


def answer(ttft_s: float, status: int = 200) -> FaultAnswer:
    """An answer that took so long to begin."""
    return FaultAnswer("1", status=status, began_s=1.0, first_s=1.0 + ttft_s)


def test_what_others_saw_is_judged(tmp_path: Path) -> None:
    """Times above 1.2 of what they were alone, errors, breakers, memory, and answers beyond a rate are missed, each in
    a row of its own; with `--counts` times and memory are not judged."""
    bench = Bench(rivals.ours(), Scale(), tmp_path)
    alone, log = [answer(0.010)] * 10, '{"event":"replica_up"}'

    def missed(
        bench: Bench, beside: list[FaultAnswer], grown_mb: float, log: str, became: dict[int, int]
    ) -> list[bool]:
        found = tenants._judge_way(bench, tenants.RATED, alone, beside, grown_mb, log, became)
        return [row.ok is False for row in found]

    assert missed(bench, [answer(0.0119)] * 10, 200.0, log, {429: 9}) == [False] * 5
    assert missed(bench, [answer(0.013)] * 10, 200.0, log, {429: 9}) == [True, False, False, False, False]
    bad = [answer(0.010)] * 9 + [answer(0.010, 502)]
    broken = log + '{"event":"breaker_open"}'
    assert missed(bench, bad, 300.0, broken, {429: 9, 200: 1}) == [False, True, True, True, True]
    counts = Bench(rivals.ours(), Scale(counts=True, slack=math.inf), tmp_path)
    assert missed(counts, [answer(1.0)] * 10, 900.0, log, {429: 9}) == [False] * 4


def seen(ttft_s: float, idle_s: float, status: int = 200, tokens: int = neighbours.TOKENS) -> Seen:
    """Ten answers that took so long to begin, while a server that does nothing took so long."""
    body = b"".join(answers.APIS["chat"].tokens(tokens))
    some = [answer(ttft_s, status) for _ in range(10)]
    for each in some:
        each.body = body
    return Seen(some, [idle_s] * 10)


def test_a_neighbour_is_judged_beside_each_party(tmp_path: Path) -> None:
    """Times above 1.2 of what they were alone, but for what the machine took itself, refusals, lost tokens, and a
    hostile party of which nothing came are missed, each in a row of its own; with `--counts` times are not judged."""
    timed, counts = (Bench(rivals.ours(), scale, tmp_path) for scale in (Scale(), Scale(counts=True, slack=math.inf)))
    alone = seen(0.010, 0.001)

    def missed(bench: Bench, after: Seen, *, is_hostile: bool = True) -> list[bool]:
        found = neighbours._judge_party(bench, "bytes", alone, after, is_hostile=is_hostile)
        return [row.ok is False for row in found]

    assert missed(timed, seen(0.0119, 0.001)) == [False] * 4
    assert missed(timed, seen(0.0169, 0.006)) == [False] * 4
    assert missed(timed, seen(0.0171, 0.0059)) == [True, False, False, False]
    assert missed(counts, seen(0.020, 0.001)) == [False] * 4
    assert missed(counts, seen(0.010, 0.001, tokens=7)) == [False, False, True, False]
    assert missed(counts, seen(0.010, 0.001), is_hostile=False) == [False, False, False, True]
    refused = seen(0.010, 0.001)
    refused.answers[3].status = 429
    assert missed(counts, refused) == [False, True, False, False]


def test_every_way_has_a_party() -> None:
    """Each way of a process that is hostile, and the store."""
    assert set(neighbours.PARTIES) == {*abusive_client.BESIDE, neighbours.STORE}


async def test_the_store_turns_hostile_when_it_is_told() -> None:
    """Before that it has a stream of what is added, and nothing else."""
    store = HostileStore()
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    read = bulk(b"XREAD", b"COUNT", b"2", b"BLOCK", b"60000", b"STREAMS", b"s", b"o", b"0-0", b"0-0")
    async with server, asyncio.timeout(60.0):
        (reader, writer), (added, other) = [
            await asyncio.open_connection(*server.sockets[0].getsockname()) for _ in range(2)
        ]
        writer.write(bulk(b"GET", b"x"))
        assert await reader.readuntil(b"\r\n") == NOTHING
        writer.write(read)
        other.write(bulk(b"XADD", b"s", b"*", b"m", b"hello"))
        assert await added.readuntil(b"1-0\r\n") == b"$3\r\n1-0\r\n"
        said = b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nm\r\n$5\r\nhello\r\n"
        assert await reader.readexactly(len(said)) == said
        assert store.sent == 0
        store.turn()
        writer.write(read)
        forged = await reader.readexactly(len(said) + FORGED_BYTES)
        assert forged.startswith(b"*1\r\n*2\r\n$1\r\ns\r\n*2\r\n")
        assert store.sent == 2
        for each in (writer, other):
            each.close()
