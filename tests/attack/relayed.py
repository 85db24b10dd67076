"""What a client gets of an engine's bytes, in any pieces, against a plain reading of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from router.core.dialects import OPENAI, Dialect
from router.http.engine_connection import UpstreamConnection
from router.http.exchange import UpstreamResponse
from router.http.failures import ClosedBeforeResponse, StreamInterrupted, StreamTruncated
from router.http.outbox import Outbox
from router.http.read_fairness import ReadFairness
from router.proxy.relay import TAIL_BYTES, TAIL_PIECES, Relay
from tests.attack import plain

WHOLE_BYTES_MAX = 3_000
BROKEN = b'data: {"error":"broken"}\n\n'
_LOOP = asyncio.new_event_loop()  # makes futures, and never runs: what waits is stepped by hand


class _Transport:
    """The engine's connection, of which only the end matters."""

    closed = False

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def get_extra_info(self, _: str) -> None:
        """No address."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Reading is not stopped: the pieces are given."""

    def resume_reading(self) -> None:
        """Nor begun again."""

    def writelines(self, _: object) -> None:
        """The request is of no interest."""


class _Turns:
    """A loop whose turns end when they are told to."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], None]] = []

    def call_soon(self, work: Callable[[], None], *_: object) -> None:
        """In the next turn."""
        self._soon.append(work)

    def end(self) -> None:
        """Take turns until nothing is left to do."""
        while self._soon:
            soon, self._soon = self._soon, []
            for work in soon:
                work()


@dataclass
class Client:
    """Takes an answer as the client's connection does."""

    chunked: bool
    sender: object = None
    wire: bytearray = field(default_factory=bytearray)
    ends: str = ""

    def write(self, data: bytes) -> None:
        """Bytes, framed where `chunked` says so."""
        self.wire += data

    def end(self) -> None:
        """The body is whole."""
        self.ends += "end"

    def abort_response(self) -> None:
        """The body is broken off."""
        self.ends += "cut"


@dataclass
class Got:
    """What became of an answer."""

    status: int = 0
    lines: tuple[bytes, ...] = ()
    body: bytes = b""
    how: str = ""  # whole at once, end, cut, early or waiting
    again: bool = False  # the engine's connection may be used again
    events: int = 0
    ending: object = None


@dataclass(frozen=True)
class Way:
    """How an answer is asked for, and relayed."""

    dialect: Dialect = OPENAI
    until_whole: bool = False
    chunked: bool = True
    judged: bool = False  # its stream must say that it is whole
    stripped: bool = False  # events of usage are left out
    closes: bool = True  # the engine closes its connection behind the bytes


def ways(dialect: Dialect) -> tuple[Way, ...]:
    """All ways of relaying an answer of this dialect."""
    return (
        Way(dialect),
        Way(dialect, judged=True),
        Way(dialect, judged=True, stripped=True),
        Way(dialect, chunked=False),
        Way(dialect, chunked=False, judged=True),
        Way(dialect, until_whole=True),
        Way(dialect, closes=False),
    )


def relayed(pieces: Sequence[bytes], way: Way, late: Sequence[bool] = (), *, hurried: bool = False) -> Got:
    """What a client gets. `late` says of each piece whether the tasks that wait for it run only behind the next.
    `hurried`: the time of a connection's turn is over with each slice that it parses."""
    clock = itertools.count().__next__ if hurried else lambda: 0.0
    turns = _Turns()
    got, client = Got(), Client(way.chunked)
    given_back: list[UpstreamConnection] = []
    connection = UpstreamConnection(
        given_back.append, Outbox(cast("Any", _Turns())), ReadFairness(cast("Any", turns), clock)
    )
    connection.connection_made(cast("Any", _Transport()))
    answer = UpstreamResponse("r", _LOOP, until_whole=way.until_whole, whole_bytes_max=WHOLE_BYTES_MAX)
    task = _exchange(connection, answer, client, way, got)
    going = _step(task)
    for at, piece in enumerate(pieces):
        if connection.usable:
            connection.data_received(piece)
            turns.end()
        if going and _ready(answer) and not (at < len(late) and late[at]):
            going = _step(task)
    if way.closes:
        connection.connection_lost(None)
    while going and _ready(answer):
        going = _step(task)
    got.again = bool(given_back) and connection.usable
    if going:
        got.how = "waiting"
        answer.disable_fast_path()
    task.close()
    got.status, got.lines = answer.status, tuple(answer.lines)
    if client.wire or client.ends:
        got.body = _unframed(bytes(client.wire)) if client.chunked else bytes(client.wire)
    answer.close()
    return got


async def _exchange(
    connection: UpstreamConnection, answer: UpstreamResponse, client: Client, way: Way, got: Got
) -> None:
    try:
        await answer.begin(connection, b"", b"")
    except ClosedBeforeResponse:
        got.how = "early"
        return
    if answer.whole:
        got.how, got.body = "at once", answer.head
        return
    judge = way.dialect if way.judged and answer.streams and answer.status == 200 else None
    strip_usage = way.dialect if way.stripped else None
    relay = Relay(answer, cast("Any", client), judge=judge, strip_usage=strip_usage)
    try:
        await answer.relay(relay)
        relay.end()
    except StreamTruncated:
        relay.end_with_error(lambda *_: BROKEN)
        got.how = "unfinished "
    except StreamInterrupted:
        relay.end_with_error(lambda *_: BROKEN)
        got.how = "broken "
    got.how += client.ends
    got.events, got.ending = relay.events, relay.ending


def _ready(answer: UpstreamResponse) -> bool:
    waiter = answer._waiter
    return waiter is None or waiter.done()


def _step(task: Coroutine[Any, Any, None]) -> bool:
    """Run the task until it waits for what is not there. False when it has ended."""
    while True:
        try:
            waits = task.send(None)
        except StopIteration:
            return False
        if not waits.done():
            return True


def _unframed(wire: bytes) -> bytes:
    """The body in these chunks, as far as it came; every chunk of ours must be whole."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    messages, stopped, _ = plain.read(head + wire + b"0\r\n\r\n", httptools.HttpResponseParser)
    assert not stopped, f"our own framing: {stopped}"
    assert len(messages) == 1
    assert messages[0].whole, "our own framing is open"
    return messages[0].body


def judged(data: bytes, pieces: Sequence[bytes], way: Way, late: Sequence[bool] = (), *, clean: bool = False) -> None:
    """Raise AssertionError where a client gets something else of the pieces than of the whole, or of that than what a
    plain reading finds in it. A `clean` answer is one that engines send, and must come through."""
    whole, in_pieces = relayed([data], way), relayed(pieces, way, late)
    if clean or not way.judged or not _open_to_opinion(data):
        assert _told(in_pieces, clean=clean) == _told(whole, clean=clean), f"in pieces {in_pieces}, whole {whole}"
    meant = _plainly(data, closes=way.closes)
    for got in (whole, in_pieces):
        _compared(got, meant, way, clean=clean)


def _open_to_opinion(data: bytes) -> bool:
    """Whether a relay's verdict on a stream may depend on its pieces: it remembers so much of one, and drops comments
    that come alone, but not what they say within other events."""
    return len(data) > TAIL_BYTES or data.count(b"\n") > TAIL_PIECES or b"\n:" in data


def _told(got: Got, *, clean: bool) -> tuple[object, ...]:
    body = got.body
    if got.how not in ("at once", "end"):  # blank lines behind its last event say nothing, and may wait with the next
        body = body.rstrip().removesuffix(BROKEN.rstrip()).rstrip(b"\r\n")
    how = "end" if got.how == "at once" else got.how  # a body without a length may be whole by the time it is sent
    told = got.status, got.lines if got.status else (), body, how, got.ending
    return (*told, got.again, got.events) if clean else told


def _plainly(data: bytes, *, closes: bool) -> tuple[bytes, bool]:
    """The body of the first answer that is final, and whether it is whole."""
    messages, stopped, _ = plain.read(data, httptools.HttpResponseParser)
    final = [message for message in messages if not 100 <= message.status < 200 or not message.headed]
    if not final or not final[0].headed:
        return b"", False
    message = final[0]
    until_eof = not message.values(b"content-length") and not message.values(b"transfer-encoding")
    return message.body, message.whole or (until_eof and closes and not stopped)


def _compared(got: Got, meant: tuple[bytes, bool], way: Way, *, clean: bool) -> None:
    body, whole = meant
    if got.how in ("at once", "end"):
        assert whole, f"looks whole and is not: {got}"
    if not way.stripped:
        if got.how in ("at once", "end"):
            assert got.body == body, f"{got}, plainly {body!r}"
        said = got.body.removesuffix(BROKEN)
        if said != got.body and not body.startswith(said):
            said = said.removesuffix(b"\n\n")  # which ends an event that was too long to be held, before the error
        assert body.startswith(said), f"{got}, plainly {body!r}"
    if clean and whole:
        assert got.how in ("at once", "end"), f"did not come through: {got}"
