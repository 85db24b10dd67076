"""A burst of one cold prefix through several routers, as processes with a store before simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import ClientSession

from loadtest.fake_engine.command import Engines, EngineSettings
from tests.peering.stores import StoreServer
from tests.peering.test_processes import sharing_of
from tests.support.command import Command, command

ROUTERS, REPLICAS, REQUESTS = 4, 4, 24
STREAMS = 64  # answers that are being decoded meanwhile: a copy of the prefix would hold up those of one replica
PREFIX_TOKENS, BYTES_PER_TOKEN = 16_000, 4
TWICE = 2  # most that such a prefix may be computed
COMPLETIONS = "/v1/completions"


async def _cached(client: ClientSession, url: str, prompt: str) -> int:
    """Tokens of a prompt that the engine had, which it was sent to."""
    body = {"model": "sim", "prompt": prompt, "max_tokens": 4}
    async with client.post(url + COMPLETIONS, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        details = answer["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens", 0))


@asynccontextmanager
async def _stream(client: ClientSession, url: str, prompt: str) -> AsyncIterator[None]:
    """A long answer that has begun."""
    body = {"model": "sim", "prompt": prompt, "max_tokens": 16_000, "stream": True}
    async with client.post(url + COMPLETIONS, json=body) as response:
        assert response.status == 200
        await response.content.readany()
        yield


async def _computed(client: ClientSession, urls: Sequence[str], name: str) -> int:
    """How often a prefix that nobody has is computed, when it is asked for by many at once through these routers."""
    prefix = f"{name:>16}" * (PREFIX_TOKENS * BYTES_PER_TOKEN // 16)
    asked = [_cached(client, urls[n % len(urls)], f"{prefix}{n:>16}") for n in range(REQUESTS)]
    return sum(cached < PREFIX_TOKENS // 2 for cached in await asyncio.gather(*asked))


async def _all_hear_all(client: ClientSession, routers: Sequence[Command]) -> None:
    async with asyncio.timeout(60):
        for router in routers:
            while True:
                said = await sharing_of(client, router.admin_url)
                if said["whole"] and len(said["routers"]) == len(routers) - 1:
                    break
                await asyncio.sleep(0.05)


@pytest.mark.long
async def test_a_cold_prefix_is_computed_as_seldom_as_through_one_router(client: ClientSession) -> None:
    """24 requests at once for a prefix of 16,000 tokens that nobody has, before replicas that are busy: it is computed
    at most twice, through one router and through four that share. Four that do not share compute it three times."""
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(Engines(EngineSettings(replicas=REPLICAS, port=0)))
        store = await stack.enter_async_context(StoreServer())
        started = [command(*engines.urls, peering__redis_url=store.url) for _ in range(ROUTERS)]
        routers = await asyncio.gather(*(stack.enter_async_context(each) for each in started))
        await _all_hear_all(client, routers)
        urls = [router.url for router in routers]
        for n in range(2 * REPLICAS):  # speeds are learned before anything is counted
            await asyncio.gather(*(_cached(client, url, f"{n:>8}{m:>8}" * 500) for m, url in enumerate(urls)))
        for n in range(STREAMS):
            await stack.enter_async_context(_stream(client, urls[n % ROUTERS], f"{n:>16}" * 16))
        one = await _computed(client, urls[:1], "one")
        four = await _computed(client, urls, "four")
        assert one <= TWICE
        assert four <= TWICE
