"""Send calls of the mixed workload, one at a time or side by side, and judge the router by what the engines answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.real.exact_workload import Call, Script
from tests.real.talk import Answer, events, note_headers, note_usage, prose
from tests.real.vllm_server import BLOCK_TOKENS, MODEL

OPEN_SCRIPTS = 36


@dataclass
class Seen:
    """One request made: what was asked, what came, and what was going on when it was sent."""

    number: int
    call: Call
    answer: Answer
    sent_s: float = 0.0
    ended_s: float = 0.0
    others: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """The router foretold what the engine found."""
        return self.answer.predicted_tokens == self.answer.cached_tokens

    @property
    def false_credit(self) -> bool:
        """The router believed in more than a block that was not there."""
        return (self.answer.predicted_tokens or 0) > self.answer.cached_tokens + BLOCK_TOKENS

    def line(self) -> str:
        """All that helps to find out why it was not as foretold."""
        said = self.answer
        return (
            f"#{self.number} {self.call.kind} {self.call.path}{' streamed' if said.streamed else ''}: predicted "
            f"{said.predicted_tokens}, cached {said.cached_tokens} of {said.prompt_tokens} at {said.replica[-5:]}; "
            f"{said.grade} {said.reason}; beside {', '.join(self.others) or 'nothing'}"
        )


def note_tokens(answer: Answer, usage: dict[str, Any] | None) -> None:
    """Keep the engine's counts, whichever API they come from."""
    if not usage:
        return
    if "input_tokens_details" in usage:
        answer.prompt_tokens = usage["input_tokens"]
        answer.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    elif "input_tokens" in usage:
        cached = usage.get("cache_read_input_tokens") or 0
        answer.prompt_tokens = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
        answer.cached_tokens = cached
    else:
        note_usage(answer, usage)


def text_of(said: dict[str, Any]) -> str:
    """The text of a whole answer, or of one event of a stream."""
    if "choices" in said:
        return "".join(
            choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            for choice in said["choices"]
        )
    if said.get("type") == "message":
        return "".join(block.get("text", "") for block in said["content"])
    if said.get("object") == "response":
        parts = [part for item in said["output"] for part in item.get("content") or ()]
        return "".join(part.get("text", "") for part in parts)
    delta = said.get("delta")
    text = delta.get("text", "") if isinstance(delta, dict) else delta
    return text if isinstance(text, str) and "reasoning" not in said.get("type", "") else ""


async def read(answer: Answer, response: httpx.Response) -> None:
    """Take text and counts from a whole answer or a stream of any of the four APIs."""
    if not answer.streamed:
        said = json.loads(await response.aread())
        answer.text = text_of(said)
        note_tokens(answer, said.get("usage"))
        return
    async for data in events(response):
        if data == "[DONE]":
            continue
        said = json.loads(data)
        if said.get("error"):
            answer.failure = f"error event {data[:200]}"
        if said.get("type") == "message_delta" or "choices" in said:
            note_tokens(answer, said.get("usage"))
        elif said.get("type") in {"response.completed", "response.incomplete"}:
            note_tokens(answer, said["response"]["usage"])
        if not str(said.get("type", "")).endswith((".done", "_arguments.delta")):
            answer.text += text_of(said)


async def send(client: httpx.AsyncClient, call: Call) -> Answer:
    """Make one call and read its answer; never raises: what broke is in `failure`."""
    answer = Answer(streamed=bool(call.body.get("stream")))
    try:
        async with client.stream("POST", call.path, json=call.body) as response:
            note_headers(answer, response)
            if response.status_code == 200:
                await read(answer, response)
                answer.failure = answer.failure or ("" if answer.prompt_tokens else "no usage")
            else:
                answer.failure = f"{response.status_code} {(await response.aread()).decode()[:300]}"
    except httpx.HTTPError as broken:
        answer.failure = f"{type(broken).__name__}: {broken}"
    return answer


async def send_salted(client: httpx.AsyncClient) -> None:
    """Send one salted prompt: until the events of a first one name its salt, requests beside it are only estimated."""
    body = {"model": MODEL, "prompt": prose("salted", 3 * BLOCK_TOKENS), "max_tokens": 1, "cache_salt": "first"}
    (await client.post("/v1/completions", json=body)).raise_for_status()


class Drive:
    """Requests made one after the other or side by side, from one supply of scripts; may go on after it stopped."""

    def __init__(
        self, client: httpx.AsyncClient, supply: Iterator[Script], seed: str, open_scripts: int = OPEN_SCRIPTS
    ) -> None:
        self.client = client
        self.seen: list[Seen] = []
        self._supply = supply
        self._rng = random.Random(seed)
        self._idle = [(script, next(script)) for script in (next(supply) for _ in range(open_scripts))]
        self._flying: dict[int, Seen] = {}
        self._count = 0

    async def run(
        self, requests: int, concurrency: int, until: Callable[[Seen], bool] = lambda _: False, rest_s: float = 0.0
    ) -> list[Seen]:
        """Make so many requests, fewer if `until` says so of one; what was seen, in the order of answers. After each
        answer whoever asked rests for `rest_s`."""
        first, self._count, stop = len(self.seen), self._count + requests, False
        target = self._count

        async def worker() -> None:
            nonlocal stop
            while not stop and len(self.seen) + len(self._flying) < target:
                stop = until(await self._one()) or stop
                await asyncio.sleep(rest_s)

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        self._count = len(self.seen)
        return self.seen[first:]

    async def _send(self, call: Call) -> Answer:
        return await send(self.client, call)

    async def _one(self) -> Seen:
        script, call = self._idle.pop(self._rng.randrange(len(self._idle)))
        seen = Seen(len(self.seen) + len(self._flying), call, Answer(), time.monotonic())
        seen.others = [f"{each.call.kind} since {seen.sent_s - each.sent_s:.3f} s" for each in self._flying.values()]
        self._flying[id(seen)] = seen
        try:
            seen.answer = await self._send(call)
        finally:
            del self._flying[id(seen)]
        seen.ended_s = time.monotonic()
        self.seen.append(seen)
        try:
            self._idle.append((script, script.send(seen.answer)))
        except StopIteration:
            script = next(self._supply)
            self._idle.append((script, next(script)))
        return seen
