"""Whatever comes over HTTP is the same message wherever the network cuts it, and the one that httptools reads."""

from __future__ import annotations

import os
import random

import pytest

from router.core.dialects import OPENAI
from tests.attack import cuts, plain
from tests.attack.received import BODY_BYTES_MAX, Received, judged, received
from tests.attack.relayed import Got, Way, relayed
from tests.attack.relayed import judged as answer_judged
from tests.support.examples import examples
from tests.support.recorded import SSE, chunked, event, head, words

pytestmark = [
    pytest.mark.promise("A message is parsed as llhttp parses it, however the network cuts it.", "clients"),
    pytest.mark.promise("No byte after the last request of a connection is read.", "clients"),
]

CUTS = examples(int(os.environ.get("WARMROUTE_CUTS", "2000")))
SEED = 20_261
BEHIND = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def each_place(data: bytes, step: int = 1) -> list[list[bytes]]:
    """The data in two pieces, in all ways; and byte by byte."""
    two = [[data[:at], data[at:]] for at in range(1, len(data), step)]
    return [*two, [data[at : at + 1] for at in range(len(data))]]


def test_random_cuts() -> None:
    """Thousands of messages, valid and hostile, cut at random: nothing is read in another way than whole, or than
    plainly."""
    assert cuts.many(SEED, CUTS) == ""


@pytest.mark.parametrize("name", [name for name in cuts.REQUESTS if "long" not in name])
def test_requests_at_every_place(name: str) -> None:
    """Each request of the corpus, cut at each of its places, with another request behind it."""
    data = cuts.REQUESTS[name] + BEHIND
    for pieces in each_place(data):
        judged(data, pieces)


@pytest.mark.parametrize("name", cuts.ANSWERS)
def test_answers_at_every_place(name: str) -> None:
    """Each answer that engines send, cut at each of its places, comes through."""
    data, dialect = cuts.ANSWERS[name]
    for pieces in each_place(data):
        answer_judged(data, pieces, Way(dialect, judged=True), clean=True)


@pytest.mark.parametrize("line", [b"Connection: close\r\n", b"Connection: keep-alive, Close\r\n", b""])
def test_nothing_is_read_behind_the_last_request(line: bytes) -> None:
    """What comes behind a request that ends its connection is no request and no error (RFC 9112 section 9.6)."""
    version = b"1.1" if line else b"1.0"
    data = b"POST /a HTTP/%b\r\nHost: x\r\n%bContent-Length: 2\r\n\r\n{}" % (version, line) + BEHIND
    for pieces in [[data], *each_place(data)]:
        heard = received(pieces)
        assert (len(heard.requests), heard.refusal) == (1, None), pieces


@pytest.mark.parametrize("place", range(3))
def test_a_refusal_behind_a_wish_for_another_protocol(place: int) -> None:
    """A head that is read a second time is refused for the same reason as any other."""
    size = BODY_BYTES_MAX + 1
    at = b"POST /a HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = at + b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size)
    cut = (len(data), len(at), len(at) + 100)[place]
    assert received([data[:cut], data[cut:]]).refusal == (413, "body_too_large")


@pytest.mark.parametrize(("extra", "refusal"), [(0, None), (1, (431, "head_too_large"))])
def test_the_limit_of_a_head_is_the_same_in_pieces(extra: int, refusal: tuple[int, str] | None) -> None:
    """A head with as many bytes as are allowed is taken and one with one more refused, wherever it begins in what is
    read, and wherever it is cut."""
    fixed = len(b"/" + b"Host" + b"x")
    lines, left = [], plain.HEAD_BYTES_MAX - fixed + extra
    while left:
        size = min(left, 9_000)
        lines.append(b"%b: %b\r\n" % (b"a" * 10, b"b" * (size - 10)))
        left -= size
    data = BEHIND + b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(lines) + b"\r\n"
    for pieces in ([data], *([data[:at], data[at:]] for at in range(1, len(data), 3_001))):
        heard = received(pieces)
        assert (len(heard.requests), heard.refusal) == (1 if refusal else 2, refusal)


def test_a_stream_is_judged_by_what_came_before_its_last_event() -> None:
    """`[DONE]` before the stream is whole is not passed on, also when what comes behind it is already there."""
    pieces = [event({"choices": [{"index": 0, "delta": {"content": "a"}}]}), *words()[-1:], *words()]
    data = head(SSE) + b"".join(pieces)
    for cut in ([data], *each_place(data)):
        got = relayed(cut, Way(OPENAI, judged=True))
        assert got.how == "unfinished end"
        assert b"[DONE]" not in got.body


def test_an_interim_answer_has_no_body() -> None:
    """A body behind a status of 199 is no answer, and no part of it reaches the client."""
    framed = chunked(words("a" * 50)).partition(b"\r\n")[2]
    data = b"HTTP/1.1 199 Odd\r\n" + framed
    for pieces in [[data], *each_place(data, 7)]:
        got = relayed(pieces, Way(OPENAI))
        assert (got.status, got.body, got.how) == (0, b"", "early"), pieces


def test_the_judges_judge() -> None:
    """A message that is read differently, looks whole and is not, or does not come through, is told."""
    good = cuts.REQUESTS["length"]
    with pytest.raises(AssertionError):
        judged(good, [good[:-1]])
    data, dialect = cuts.ANSWERS["chat"]
    with pytest.raises(AssertionError):
        answer_judged(data, [data.replace(b"a", b"b")], Way(dialect))
    unfinished = chunked(words("a")[:1])
    with pytest.raises(AssertionError):
        answer_judged(unfinished, [unfinished], Way(dialect, judged=True), clean=True)
    assert received([good]) != Received()
    assert relayed([data], Way(dialect)) != Got()


def test_what_is_cut_is_whole() -> None:
    """Cutting loses nothing, and the corpus is mostly of messages that are taken."""
    choose = random.Random(SEED)
    data = chunked(words("a" * 50))
    assert all(b"".join(pieces) == data and all(pieces) for pieces in (cuts.cut(choose, data) for _ in range(200)))
    taken = [bool(received([cuts.some_requests(choose)]).requests) for _ in range(300)]
    assert 100 < sum(taken) < 300


def test_very_many_wishes_for_another_protocol() -> None:
    """However many heads in one read wish for another protocol, each is read again without it, one by one."""
    one = b"GET /a HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"
    heard = received([one * 2_000])
    assert (len(heard.requests), heard.refusal) == (2_000, None)
