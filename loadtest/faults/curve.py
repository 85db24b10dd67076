"""Memory over a million requests, `python -m loadtest faults --requests [N]`: all different, with default settings.

Every request has a unique value in each field that is a key of a router cache:

- In the prompt: system prompt, message, tool and salt.
- Identities: user, session, conversation and tenant.
- Metadata: request id, trace and client.

Two in five requests continue an earlier conversation, so that matches, histories and touches are stored too. Caches
fill within the first half. Growth in the second half is a leak, or a bound that does not hold. The replicas are those
of `python -m loadtest overhead`, with negligible cost.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from statistics import linear_regression

from loadtest.common.processes import READY, run_process
from loadtest.common.report import Row
from loadtest.common.usage import rss_mb
from loadtest.faults.bench import Bench, row
from loadtest.proxy_cost.answers import MODEL
from loadtest.proxy_cost.load import Connection, Connections, Tally
from loadtest.proxy_cost.upstream import RATE_PER_S

GOAL = 19
REQUESTS = 1_000_000
REPLICAS, CONNECTIONS = 4, 16
SAMPLES = 100  # of memory, evenly by requests
GROWTH_MAX = 0.05  # in the second half, as a part of the memory at its beginning
CONTINUED = 0.4  # share of requests that continue an earlier conversation
CONVERSATIONS = 1_000  # number of conversations that are kept here to be continued
TURNS_MAX = 6
TEXT_BYTES = (100, 400, 1_500, 6_000)  # lengths of texts, equally often
ERRORS_MAX = 100
FLAGS = ("--set", "log.requests=false")


class Talk:
    """Endless sequence of requests, all different, determined by the seed."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self._said: list[list[dict[str, str]]] = []
        self._numbers = count()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self._request(next(self._numbers))

    def _text(self) -> str:
        return self._choose.randbytes(self._choose.choice(TEXT_BYTES) // 2).hex(" ", 3)

    def _messages(self) -> list[dict[str, str]]:
        choose = self._choose
        if self._said and choose.random() < CONTINUED:
            said = choose.choice(self._said)
            if len(said) < 2 * TURNS_MAX:
                said += [{"role": "assistant", "content": self._text()}, {"role": "user", "content": self._text()}]
                return said
        said = [{"role": "system", "content": self._text()}, {"role": "user", "content": self._text()}]
        if len(self._said) < CONVERSATIONS:
            self._said.append(said)
        else:
            self._said[choose.randrange(CONVERSATIONS)] = said
        return said

    def _request(self, number: int) -> bytes:
        name = f"{number}-{self._choose.getrandbits(40):x}"
        tool = {"name": f"tool_{number}", "description": name, "parameters": {"type": "object", "properties": {}}}
        body = {
            "model": MODEL,
            "messages": self._messages(),
            "tools": [{"type": "function", "function": tool}] if number % 4 == 0 else None,
            "user": f"user {name}",
            "prompt_cache_key": f"key {name}" if number % 2 else None,
            "cache_salt": f"salt {name}" if number % 8 == 0 else None,
            "metadata": {"step": name},
        }
        data = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"User-Agent: client {name}\r\nx-session-id: session {name}\r\nx-warmroute-tenant: tenant-{name}\r\n"
            f"x-request-id: id-{name}\r\ntraceparent: 00-{number + 1:032x}-{number + 1:016x}-01\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


class Curve:
    """Sends requests on several connections, and samples memory at equal intervals of requests."""

    def __init__(self, requests: int, seed: int, pid: int) -> None:
        self._requests, self._pid = requests, pid
        self._talk = iter(Talk(seed))
        self._sent = 0
        self.tally = Tally()
        self.rss_mb: list[tuple[int, float]] = []

    async def go(self, connections: Sequence[Connection]) -> None:
        """Send all requests; each connection sends the next one as soon as it has its response."""
        await asyncio.gather(*(self._ask(connection) for connection in connections))

    async def _ask(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        while self._sent < self._requests and self.tally.errors.total() < ERRORS_MAX:
            self._sent += 1
            answered: asyncio.Future[str | None] = loop.create_future()
            connection.done = functools.partial(_settle, answered)
            connection.ask(next(self._talk), None)
            await answered
            if self.tally.done * SAMPLES // self._requests > len(self.rss_mb) - 1:
                self.rss_mb.append((self.tally.done, rss_mb(self._pid)))


def _settle(answered: asyncio.Future[str | None], wrong: str | None) -> None:
    if not answered.done():
        answered.set_result(wrong)


def growth(samples: Sequence[tuple[int, float]]) -> float | None:
    """Return the growth in the second half, as a part of the memory at its beginning; None with too few samples.

    The growth is that of the straight line with the best fit. Caches of two generations drop one of them occasionally,
    so a single sample means little.
    """
    half = [sample for sample in samples if sample[0] >= samples[-1][0] / 2] if samples else []
    if len(half) < 3:
        return None
    slope, start = linear_regression(*zip(*half, strict=True))
    first, last = half[0][0], half[-1][0]
    return slope * (last - first) / (start + slope * first)


async def curve(bench: Bench, requests: int, seed: int) -> list[Row]:
    """Return a row for each sample, and the judged rows."""
    bench.only_ours("its memory is looked at")
    words = [
        sys.executable,
        "-m",
        "loadtest.proxy_cost.upstream",
        "--replicas",
        str(REPLICAS),
        "--rate",
        str(RATE_PER_S),
    ]
    async with run_process("upstream", words, bench.folder) as upstream:
        urls = [said[1] for said in await upstream.wait_for_output(READY, REPLICAS)]
        async with bench.run_cluster(flags=FLAGS, urls=urls, asked=False) as run:
            found = Curve(requests, seed, run.process.pid)
            async with Connections([("127.0.0.1", run.port)], CONNECTIONS, found.tally) as connections:
                await found.go(connections)
    grown, errors = growth(found.rss_mb), found.tally.errors
    return [*_samples(found.rss_mb), *_judge_growth(found.tally.done, grown, errors, requests)]


def _samples(samples: Sequence[tuple[int, float]]) -> list[Row]:
    return [
        Row(goal=str(GOAL), case=f"memory after {requests:,} requests", requests=requests, rss_mb=round(mb, 1), got=mb)
        for requests, mb in samples
    ]


def _judge_growth(done: int, grown: float | None, errors: Counter[str], requests: int) -> list[Row]:
    case = f"{requests:,} requests, no two alike: growth of memory in the second half"
    return [
        row(GOAL, case, GROWTH_MAX, grown, note=f"{os.cpu_count()} cores"),
        row(GOAL, "... requests without a good answer", 0, requests - done, note=str(dict(errors) or "")),
    ]
