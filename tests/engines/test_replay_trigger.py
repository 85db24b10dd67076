"""A replica that was joined late is asked to repeat what it holds."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from router.core.kv_events.batch_decoder import Removed, Stored
from router.core.placement.answer_feedback import UnreportedHit
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.prompts.block_keys import token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence
from router.core.types.replicas import Replica
from router.engines.replay_trigger import EventReplayTrigger
from tests.support import fakes
from tests.support.fakes import FakeEngine

BLOCK = 16


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """A replica."""
    async with FakeEngine() as made:
        yield made


def _router(url: str) -> Router:
    router = Router(
        POLICIES["warm"](), index_bytes_max=1 << 20, remembered_prompts_max=16, default_cache_blocks=16, repeats=True
    )
    router.replace([Replica(url)])
    router.models.observe_tokens("m", "")
    router.knowledge.set_untokenizable(url, "")
    router.knowledge.grade(url, Confidence.CATCHING_UP, "joined late", 0.0)
    return router


def _prompt(tokens: int) -> TokenPrompt:
    ids = array("I", range(tokens)).tobytes()
    return TokenPrompt(ids, "", b"s", {BLOCK: token_chain(ids, BLOCK, token_root("", b"s", BLOCK))})


async def test_a_repetition_is_asked_for_and_is_no_second_copy(engine: FakeEngine) -> None:
    """One request of one token, with what was cached and one token more; what it stores again is held once."""
    router, prompt = _router(engine.url), _prompt(64)
    event = Stored([1, 2, 3, 4], None, prompt.ids, BLOCK, "", b"s", None, "GPU", 0, True, None)
    router.knowledge.apply(engine.url, event, 0.0)

    async def repeats(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        router.knowledge.apply(engine.url, event, 1.0)
        return await fakes.ok(fake, request)

    engine.script.append(repeats)
    announcer = EventReplayTrigger(router.outcomes.unannounced, api_key="")
    try:
        await announcer.announce(UnreportedHit(engine.url, "m", prompt, 48))
    finally:
        await announcer.close()
    (seen,) = engine.seen
    assert seen.path == "/v1/completions"
    assert seen.json["prompt"] == list(range(49))
    assert (seen.json["max_tokens"], seen.json["cache_salt"]) == (1, "s")
    assert seen.json["vllm_xargs"] == {"kv_cache_report_mode": "full"}
    router.knowledge.apply(engine.url, Removed([1, 2, 3, 4], "GPU", 0), 2.0)
    assert router.knowledge.find_stored(prompt, 2.0) == {}


async def test_what_another_router_has_repeated_is_no_second_copy_either(engine: FakeEngine) -> None:
    """It comes at any time, and nothing here was asked for."""
    router, prompt = _router(engine.url), _prompt(64)
    event = Stored([1, 2, 3, 4], None, prompt.ids, BLOCK, "", b"s", None, "GPU", 0, True, None)
    router.knowledge.apply(engine.url, event, 0.0)
    router.knowledge.apply(engine.url, event, 1.0)
    assert router.knowledge.find_stored(prompt, 1.0)[engine.url].tokens == 64
    router.knowledge.apply(engine.url, Removed([1, 2, 3, 4], "GPU", 0), 2.0)
    assert router.knowledge.find_stored(prompt, 2.0) == {}


async def test_a_replica_that_refuses_costs_nothing(engine: FakeEngine) -> None:
    """It is logged, and the next one is asked all the same."""
    router = _router(engine.url)
    engine.script.append(fakes.status(400))
    announcer = EventReplayTrigger(router.outcomes.unannounced, api_key="")
    router.outcomes.unannounced.append(UnreportedHit(engine.url, "m", _prompt(64), 48))
    watching = asyncio.create_task(announcer.watch())
    try:
        async with asyncio.timeout(60):
            while not engine.seen:
                await asyncio.sleep(0.01)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await announcer.close()
    assert not router.outcomes.unannounced
