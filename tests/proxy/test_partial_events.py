"""A long event is looked through a bounded number of times while it comes, in however small pieces."""

from __future__ import annotations

from typing import Any, cast

import pytest

import router.proxy.relay
from router.core.dialects import ANTHROPIC, OPENAI, SGLANG, Dialect
from router.core.types.placements import EndReason
from router.http.exchange import FIRST_EVENT_BYTES_MAX
from router.proxy.relay import PARTIAL_BYTES_MAX, Relay
from tests.attack.relayed import Client, Way, relayed
from tests.core.test_growth import LEAST_S, SLACK, TIMES, UNITS, _grows
from tests.support.recorded import SSE, head, words

TIMES_LOOKED_MAX = 4  # looks at a byte: for its event's end by two patterns, and twice for what the event says
STARTS = {"openai": b'data: {"choices":[{"index":0,"delta":{"content":"', "anthropic": b'data: {"delta":{"text":"'}


class Looked(bytearray):
    """A partial event that counts what is searched of it."""

    bytes = 0

    def rfind(self, sub: Any, *where: Any) -> int:
        """From this place on."""
        self.bytes += len(self) - (where[0] if where else 0)
        return super().rfind(sub, *where)


class Judge:
    """A dialect that counts what it is asked about."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect, self.bytes = dialect, 0
        self.says_done = dialect.says_done

    def find_ending(self, tail: bytes) -> EndReason | None:
        """The dialect's."""
        self.bytes += len(tail)
        return self.dialect.find_ending(tail)


class Answer:
    """The answer, which never fails here."""

    streams, unlabelled, moved = True, False, False


def work(size: int, piece_bytes: int, dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that are looked at of an event of so many bytes."""
    counted = 0

    def counting(name: str) -> None:
        real = getattr(router.proxy.relay, name)

        def look(data: bytes) -> object:
            nonlocal counted
            counted += len(data)
            return real(data)

        monkeypatch.setattr(router.proxy.relay, name, look)

    for name in ("_done", "is_progress"):
        counting(name)
    judge, client = Judge(dialect), Client(chunked=True)
    relay = Relay(cast("Any", Answer()), cast("Any", client), judge=cast("Any", judge))
    relay._partial = partial = Looked()
    event = STARTS.get(dialect.name, STARTS["openai"]) + b"x" * size + b'"}}]}\n\n'
    for at in range(0, len(event), piece_bytes):
        relay.body(event[at : at + piece_bytes])
    monkeypatch.undo()
    assert relay.bytes == len(event)
    return counted + judge.bytes + partial.bytes


@pytest.mark.promise("Each byte of a partial event is looked at a bounded number of times.", "engines")
@pytest.mark.inside
@pytest.mark.parametrize("dialect", [OPENAI, ANTHROPIC, SGLANG], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("piece_bytes", [100, 1_400, 16_384, 100_000])
def test_work_is_in_proportion(dialect: Dialect, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long an event is at most twice as much work, and each byte is looked at a few times."""
    before = 0
    for size in (PARTIAL_BYTES_MAX // 2, PARTIAL_BYTES_MAX - 1_000, 4 * PARTIAL_BYTES_MAX, 8 * PARTIAL_BYTES_MAX):
        now = work(size, piece_bytes, dialect, monkeypatch)
        assert now <= TIMES_LOOKED_MAX * size + 3 * PARTIAL_BYTES_MAX, (size, now)
        if size == 8 * PARTIAL_BYTES_MAX:
            assert now <= 2 * before
        before = now


@pytest.mark.promise("Each byte of a partial event is looked at a bounded number of times.", "engines")
@pytest.mark.parametrize("way", [Way(OPENAI), Way(OPENAI, judged=True, stripped=True), Way(ANTHROPIC, judged=True)])
def test_no_stream_grows_faster_than_its_input(way: Way) -> None:
    """Whatever stands in it again and again, in reads of a few hundred bytes, from its first event on."""
    for unit in UNITS:

        def relay(data: bytes) -> None:
            relayed([head(SSE), *(data[at : at + 256] for at in range(0, len(data), 256))], way)

        short_s, long_s = _grows(relay, b"", unit, b"")
        assert long_s <= SLACK * TIMES * max(short_s, LEAST_S), (unit, short_s, long_s)


@pytest.mark.parametrize("end", [b"\n\n", b"\n\r\n", b"\r\n\r\n"])
@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 1_000])
def test_the_first_event_is_found_however_it_is_cut(end: bytes, piece_bytes: int) -> None:
    """Pings and blank lines before it begin nothing; an end may come in two or three reads."""
    said = b": ping" + end + b"\n" + b"event: a" + end + words("a")[0].rstrip() + end + b"data: [DONE]" + end
    pieces = [said[at : at + piece_bytes] for at in range(0, len(said), piece_bytes)]
    got = relayed([head(SSE), *pieces], Way(OPENAI))
    assert (got.status, got.body, got.how) == (200, said, "end")


def test_pings_alone_begin_nothing() -> None:
    """So many bytes of them, in reads of one ping each, are the engine's failure."""
    ping = b": ping\n\n"
    got = relayed([head(SSE), *[ping] * (FIRST_EVENT_BYTES_MAX // len(ping) + 1)], Way(OPENAI))
    assert got.how == "early"
