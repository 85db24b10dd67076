"""Tenant that exhausts resources in one way: `python -m loadtest.faults.abusive_client WAY PORT KEY SECONDS`.

It is a separate process, so that its CPU time does not distort the times of others. At the end it prints the number of
responses by status, as JSON. Status 0 counts connections that were closed without a response.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from io import BytesIO
from itertools import count
from typing import Any

import aiohttp
import uvloop

from loadtest.faults.upstream import answers
from loadtest.faults.upstream.floods import FLOODS

PATH, COMPLETIONS = answers.APIS["chat"].path, answers.APIS["completions"].path
LANES = 4  # bodies that are sent at a time
BODY_BYTES = 8 << 20
# messages in a body that is decoded, and in one that is refused because of their number
PARTS_FEW, PARTS_MANY = 20_000, 500_000
CONNECTIONS, SLOW_BODIES, SLOW_BYTES = 300, 200, 2_048
IDS, STRINGS = 1_000_000, 500_000  # token ids, and texts, in one prompt: at most `limits.json_values_max`
CANCELS_PER_S, DEADLINES_PER_S, DEADLINE_MS = 100.0, 20.0, "20"
FLOOD_MODEL = "flood-model"  # served only by the hostile replica
FLOOD_BYTES, FLOOD_LANES = 32 << 20, 2
NEW_PER_S = 50.0  # new sessions, and new model names, per second
TOOLS, TINY_TOOLS = 1_000, 300_000
TIMEOUT_S = 30.0


class Hostile:
    """One tenant's connections, and the outcome of its requests."""

    def __init__(self, http: aiohttp.ClientSession, port: int, key: str, seconds_s: float) -> None:
        self.http, self.port, self.key = http, port, key
        self.url = f"http://127.0.0.1:{port}"
        self.end_s = time.monotonic() + seconds_s
        self.statuses: Counter[int] = Counter()

    @property
    def over(self) -> bool:
        """True if its time is over."""
        return time.monotonic() >= self.end_s

    async def post(self, body: bytes, path: str = PATH, **headers: str) -> None:
        """Send one request, and count it."""
        try:
            head = {"content-type": "application/json", **headers}
            async with self.http.post(self.url + path, data=BytesIO(body), headers=head) as response:
                async for _ in response.content.iter_any():
                    pass
                self.statuses[response.status] += 1
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.statuses[0] += 1

    async def leave(self, body: bytes) -> None:
        """Send one request, count it, and disconnect at the start of the response."""
        try:
            async with self.http.post(
                self.url + PATH, data=body, headers={"content-type": "application/json"}
            ) as response:
                self.statuses[response.status] += 1
                response.close()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.statuses[0] += 1

    async def lanes(self, *bodies: bytes, lanes: int = LANES, path: str = PATH) -> None:
        """Send these bodies in rotation, `lanes` at a time, until the end and at least once."""

        async def lane() -> None:
            while True:
                for body in bodies:
                    await self.post(body, path)
                if self.over:
                    return

        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def send_at_rate(self, per_s: float, make: Callable[[int], Awaitable[None]]) -> None:
        """Start `per_s` requests a second, until the end and at least one."""
        tasks = set[asyncio.Future[None]]()
        for number in count():
            task = asyncio.ensure_future(make(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(1.0 / per_s)
            if self.over:
                break
        await asyncio.gather(*tasks)

    async def hold(self, connections: int, first: bytes, drip: bytes) -> None:
        """Keep `connections` connections open. Each sends `first`, and then `drip` once a second."""

        async def one() -> None:
            while not self.over:
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.write(first)
                    while not self.over and not reader.at_eof():
                        writer.write(drip)
                        await writer.drain()
                        await asyncio.sleep(1.0)
                    writer.close()
                except OSError:
                    self.statuses[0] += 1
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(one() for _ in range(connections)))


def chat(text: str = "x", **more: Any) -> bytes:  # noqa: ANN401 - any JSON
    """Return a request of one message."""
    return json.dumps(answers.APIS["chat"].request(text, stream=False) | more).encode()


def repeat_item(field: str, item: dict[str, Any], number: int) -> bytes:
    """Return a request in which one item is repeated `number` times in a field; fast for any number."""
    asked = answers.APIS["chat"].request("x", stream=False)
    asked.pop(field, None)
    items = b",".join([json.dumps(item).encode()] * number)
    return json.dumps(asked)[:-1].encode() + b', "%b": [%b]}' % (field.encode(), items)


def tool(properties: int) -> dict[str, Any]:
    """Return a tool with `properties` properties in its schema."""
    schema = {f"p{i}": {"type": "string", "description": "text of a field"} for i in range(properties)}
    return {"type": "function", "function": {"name": "t", "parameters": {"type": "object", "properties": schema}}}


async def send_long_prompts(hostile: Hostile) -> None:
    """Send long prompts."""
    await hostile.lanes(chat("words " * (BODY_BYTES // 6)))


async def send_many_messages(hostile: Hostile) -> None:
    """Send bodies of many small messages: one at the decoding limit, and one above it."""
    message = {"role": "user", "content": "x"}
    await hostile.lanes(*(repeat_item("messages", message, number) for number in (PARTS_FEW, PARTS_MANY)))


async def hold_connections(hostile: Hostile) -> None:
    """Open connections without a request, and some with requests."""
    await asyncio.gather(hostile.hold(CONNECTIONS, b"", b""), hostile.lanes(chat()))


async def send_new_sessions(hostile: Hostile) -> None:
    """Send each request with a new session and a new prompt."""
    await hostile.send_at_rate(NEW_PER_S, lambda i: hostile.post(chat(f"{i} " * 500), **{"x-session-id": f"s{i}"}))


async def send_slow_bodies(hostile: Hostile) -> None:
    """Send bodies just fast enough to avoid a timeout."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {hostile.key}\r\n"
    head += "content-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    await hostile.hold(SLOW_BODIES, head.encode(), b" " * SLOW_BYTES)


async def send_unknown_models(hostile: Hostile) -> None:
    """Send model names that do not exist."""
    await hostile.send_at_rate(NEW_PER_S, lambda i: hostile.post(chat(model=f"model-{i}")))


async def send_large_tools(hostile: Hostile) -> None:
    """Send many tools with large schemas."""
    await hostile.lanes(repeat_item("tools", tool(15), TOOLS))


async def send_over_rate(hostile: Hostile) -> None:
    """Send bodies of tiny tools for a tenant with an exhausted rate; each would take a second to parse."""
    await hostile.lanes(
        repeat_item("tools", {"type": "function", "function": {"name": "t"}}, TINY_TOOLS), lanes=2 * LANES
    )


WAYS: Mapping[str, Callable[[Hostile], Awaitable[None]]] = {
    "bytes": send_long_prompts,
    "parts": send_many_messages,
    "connections": hold_connections,
    "sessions": send_new_sessions,
    "slow bodies": send_slow_bodies,
    "many models": send_unknown_models,
    "tools": send_large_tools,
    "a used-up rate": send_over_rate,
}


async def send_many_ids(hostile: Hostile) -> None:
    """Send prompts with a very large number of token ids."""
    await hostile.lanes(prompt_of(b"12345", IDS), path=COMPLETIONS)


async def send_many_strings(hostile: Hostile) -> None:
    """Send prompts with a very large number of short texts."""
    await hostile.lanes(prompt_of(b'"ab"', STRINGS), path=COMPLETIONS)


async def cancel_streams(hostile: Hostile) -> None:
    """Start streams, and disconnect at their start."""
    await hostile.send_at_rate(CANCELS_PER_S, lambda i: hostile.leave(chat(f"{i}", stream=True)))


async def send_tight_deadlines(hostile: Hostile) -> None:
    """Send short requests with a TTFT limit that cannot be met."""
    headers = {"x-warmroute-ttft-ms": DEADLINE_MS}
    await hostile.send_at_rate(DEADLINES_PER_S, lambda i: hostile.post(chat(f"{i}", stream=True), **headers))


def flood_of(kind: str) -> Callable[[Hostile], Awaitable[None]]:
    """Return a way: requests for which the engine returns a flood of this kind (of FLOODS)."""

    async def ask(hostile: Hostile) -> None:
        marks = f"[[flood={kind} flood_bytes={FLOOD_BYTES}]]"
        await hostile.lanes(chat(marks, model=FLOOD_MODEL, stream=kind != "answer"), lanes=FLOOD_LANES)

    return ask


def prompt_of(item: bytes, number: int) -> bytes:
    """Return a completion request with one item repeated `number` times in its prompt."""
    return b'{"model": "%b", "max_tokens": 8, "prompt": [%b]}' % (answers.MODEL.encode(), b",".join([item] * number))


BESIDE: Mapping[str, Callable[[Hostile], Awaitable[None]]] = {
    "bytes": send_long_prompts,
    "ids": send_many_ids,
    "strings": send_many_strings,
    "sessions": send_new_sessions,
    "cancels": cancel_streams,
    "deadlines": send_tight_deadlines,
    **{f"flood of {kind}": flood_of(kind) for kind in FLOODS},
}
"""Hostile ways beside which a neighbour is measured (`rows/neighbours.py`)."""


async def run(way: str, port: int, key: str, seconds_s: float) -> dict[int, int]:
    """Run one way, and return the number of its requests by status."""
    connector = aiohttp.TCPConnector(limit=0)
    limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
    bearer = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=connector, timeout=limit, headers=bearer) as http:
        hostile = Hostile(http, port, key, seconds_s)
        print("begins", flush=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds_s + TIMEOUT_S):
                await {**WAYS, **BESIDE}[way](hostile)
    return dict(hostile.statuses)


def main() -> int:
    """Run the command line."""
    way, port, key, seconds_s = sys.argv[1:]
    print(json.dumps(uvloop.run(run(way, int(port), key, float(seconds_s)))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
