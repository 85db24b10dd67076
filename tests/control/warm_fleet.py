"""Conversations before simulated engines, and how many of their turns find what the last one left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from aiohttp import ClientError, ClientSession

from loadtest.fake_engine.command import Engines, EngineSettings, KvEventsSettings
from loadtest.fake_engine.step import Limits

CHAT = "/v1/chat/completions"
GRADE, PREDICTED, HOME = "x-warmroute-grade", "x-warmroute-predicted-cached-tokens", "x-warmroute-replica"
BLOCK = 16


@asynccontextmanager
async def fleet(count: int = 4, *, events: bool, port: int = 0, kv_tokens: int = 200_000) -> AsyncIterator[Engines]:
    """Simulated engines; with events each has said something."""
    settings = EngineSettings(
        replicas=count,
        port=port,
        time_scale=200.0,
        kv_tokens=kv_tokens,
        limits=Limits(block_tokens=BLOCK, context_tokens_max=16_384),
        kv_events=KvEventsSettings(0, 0) if events else None,
    )
    engines = Engines(settings)
    await engines.start()
    try:
        async with ClientSession() as client:
            for url in engines.urls:
                body = {"model": "sim", "prompt": f"{url:>64}", "max_tokens": 2}
                async with client.post(url + "/v1/completions", json=body) as response:
                    assert response.status == 200
        yield engines
    finally:
        await engines.stop()


@dataclass
class Turn:
    """One turn of a conversation."""

    grade: str
    replica: str
    predicted: int
    cached: int  # tokens that the engine found
    could: int  # tokens of the turn before, in whole blocks

    @property
    def good(self) -> bool:
        """Whether it went where the turn before is held."""
        return self.cached >= self.could - 2 * BLOCK


@dataclass
class Conversations:
    """Conversations that go on, whichever router is asked."""

    client: ClientSession
    url: str = ""
    said: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)  # prompt tokens of the last turn
    at: dict[int, str] = field(default_factory=dict)  # replica of the last turn

    async def turn(self, number: int) -> Turn | None:
        """The next turn of one of them; None where the router is not there, or breaks."""
        words = Random(number * 1_000 + len(self.said.get(number, ())))
        said = self.said.setdefault(number, [])
        text = "".join(f"{words.randrange(1_000):03d} " for _ in range(800 if not said else 40))
        messages = [*said, {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": "sim", "max_tokens": 16, "messages": messages}
        try:
            async with self.client.post(self.url + CHAT, json=body) as response:
                if response.status != 200:
                    return None
                answer, headers = await response.json(), response.headers
        except (ClientError, OSError):
            return None
        usage = answer["usage"]
        said += [messages[-1], answer["choices"][0]["message"]]
        could, self.before[number] = self.before.get(number, 0), usage["prompt_tokens"]
        self.at[number] = headers[HOME]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Turn(headers[GRADE], headers[HOME], int(headers[PREDICTED]), cached, could)

    async def round(self, numbers: range, at_once: int = 4) -> list[Turn]:
        """One turn of each, a few at a time, in an order of its own."""
        order, found = Random(len(self.said)).sample(numbers, len(numbers)), list[Turn]()

        async def some() -> None:
            while order:
                turn = await self.turn(order.pop())
                if turn is not None:
                    found.append(turn)

        await asyncio.gather(*(some() for _ in range(at_once)))
        return found


def share(turns: list[Turn]) -> float:
    """The share of good ones."""
    return sum(turn.good for turn in turns) / len(turns)
