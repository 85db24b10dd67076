"""Messages cut at random: both shortcuts past the parser of HTTP must read the pieces as the whole is read.

The router's reader of requests takes bodies of known length past the parser, and gives it a head with a wish for
another protocol a second time; its reader of answers hands whole chunks that end with an event on as they came. Here
messages that are valid, odd and hostile are cut at random places, and read three times: whole, in pieces, and by
httptools alone (plain.py).
"""

from __future__ import annotations

import random
import re
from itertools import pairwise

from router.core.dialects import Dialect, dialect_of
from tests.attack import received, relayed
from tests.attack.mutate import mutated
from tests.http import test_smuggling as smuggling
from tests.http.test_exchange import NOT_ANSWERS, OK
from tests.support.recorded import RECORDED, SSE, chunked, event, head, words

PIECES = (1, 1, 2, 3, 5, 9, 40)
AT_ENDS = 0.3  # share of messages that are cut behind ends of lines only
LINE_END = re.compile(rb"\r\n")
LATE = 0.3  # share of pieces behind which a task does not get its turn
BYTES_MAX = 1 << 20
UPGRADE = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
LONG = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 1_000) for number in range(80))  # more than a head may have


def _requests() -> dict[str, bytes]:
    """Requests to begin with; what is hostile is made of them."""
    found = dict(smuggling.VALID)
    for name, raw in smuggling.VALID.items():
        at = raw.index(b"\r\n") + 2
        found[f"upgrade, {name}"] = raw[:at] + UPGRADE + raw[at:]
        found[f"close, {name}"] = raw[:at] + b"Connection: close\r\n" + raw[at:]
    found["get"] = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    found["upgraded get"] = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n"
    found["CONNECT"] = b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n"
    found["long head"] = b"GET / HTTP/1.1\r\nHost: x\r\n" + LONG + b"\r\n"
    found["long body"] = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1900\r\n\r\n" + b"x" * 1_900
    found["too long"] = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2001\r\n\r\n" + b"x" * 2_001
    found["absolute"] = b"GET http://x/a%20b?c HTTP/1.1\r\nHost: x\r\n\r\n"
    return found


def _answers() -> dict[str, tuple[bytes, Dialect]]:
    """Answers that engines send, each with its dialect."""
    found = {name: (each.raw, dialect_of(each.path)) for name, each in RECORDED.items()}
    texts = ["x" * length for length in (9, 40, 41, 40, 40, 90, 41, 40)]
    openai = dialect_of("")
    found["many events"] = chunked(words(*texts)), openai
    found["two events a chunk"] = chunked([*map(b"".join, zip(words(*texts), words(*texts), strict=True))]), openai
    nested = [event({"choices": [], "t": '}\n\n\r\n{"usage"' + "y" * 40})] * 3
    found["ends within"] = chunked([*nested, *words(*texts)]), openai
    found["error"] = b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n{}", openai
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    found["interim"] = interim + chunked(words(*texts)), openai
    return found


REQUESTS, ANSWERS = _requests(), _answers()
ODD = [*NOT_ANSWERS.values(), OK, head(SSE), head(SSE, "connection: close"), b"0\r\n\r\n", b"HTTP/1.1 204 X\r\n\r\n"]
WORDS = (*smuggling.LINES, *smuggling.BYTES, UPGRADE, b"Connection: close\r\n", b"0\r\n\r\n", b"1\r\n", b"HTTP/1.0")
EVENTS = (
    *words("a"), b"data: [DONE]\n\n", b": ping\n\n", b"\n\n", b"}\n\n\r\n", b"35\r\n", b"0\r\n\r\n", b'"usage"',
    b"1f\r\n",
)  # fmt: skip


def cut(choose: random.Random, data: bytes) -> list[bytes]:
    """The same bytes in pieces, none empty."""
    if choose.random() < 0.02:
        return [data[at : at + 1] for at in range(min(len(data), 4_000))] + [data[4_000:]] * (len(data) > 4_000)
    ends = [found.end() for found in LINE_END.finditer(data)] if choose.random() < AT_ENDS else []
    places = ends or range(len(data) + 1)  # the shortcut of answers is for reads that end with a chunk
    at = sorted({0, len(data), *(choose.choice(places) for _ in range(choose.choice(PIECES)))})
    return [data[start:end] for start, end in pairwise(at)]


def some_requests(choose: random.Random) -> bytes:
    """What a client sends on one connection: one request or several, valid or not."""
    kinds = list(REQUESTS)
    raw = b"".join(REQUESTS[choose.choice(kinds)] for _ in range(choose.choice((1, 1, 2, 3))))
    how = choose.random()
    if how < 0.3:
        raw = smuggling.mutated(choose)[1] + raw
    elif how < 0.7:
        raw = mutated(choose, [raw], WORDS, BYTES_MAX)
    return raw + smuggling.BEHIND * choose.randrange(2)


def some_answer(choose: random.Random) -> tuple[bytes, Dialect, bool]:
    """What an engine sends on one connection, its dialect, and whether that is what engines do send."""
    raw, dialect = ANSWERS[choose.choice(list(ANSWERS))]
    if choose.random() < 0.4:
        return raw, dialect, True
    pool = [raw, *ODD] if choose.random() < 0.3 else [raw]
    return mutated(choose, pool, EVENTS if choose.random() < 0.7 else WORDS, BYTES_MAX), dialect, False


def once(choose: random.Random) -> None:
    """Cut one message; raises AssertionError, and whatever a reader raises, where it is not read as it should be."""
    if choose.random() < 0.5:
        data = some_requests(choose)
        received.judged(data, cut(choose, data))
        return
    data, dialect, clean = some_answer(choose)
    pieces, way = cut(choose, data), choose.choice(relayed.ways(dialect))
    late = [choose.random() < LATE for _ in pieces]
    relayed.judged(data, pieces, way, late, clean=clean and way.closes)


def many(seed: int, count: int) -> str:
    """Cut so many messages, each by a number of its own; what was found first and how to replay that, or ""."""
    for number in range(count):
        try:
            once(random.Random(f"{seed} {number}"))
        except Exception as error:
            print(f"cuts: broken at number {number} of seed {seed}", flush=True)
            return f"{type(error).__name__}: {error}\nreplay: .venv/bin/python -m tests.attack --cut {seed} {number}"
    print(f"{count:,} random cuts of requests and answers: nothing", flush=True)
    return ""
