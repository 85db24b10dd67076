"""The whole router with replicas that publish KV events: what is said to be exact is exact.

The replicas are those of `python -m loadtest engine`: HTTP, tokenizer and KV events of their own over real sockets.
Prompts are whole tokens long (four bytes each), where the simulated tokenizer is a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession

from loadtest.fake_engine.command import Engines, EngineSettings, KvEventsSettings
from loadtest.fake_engine.step import Limits
from loadtest.fake_engine.zoo.member import DENSE, Member
from router.config.runtime import resolve
from router.core.types.placements import Confidence
from router.router_server import RouterServer
from tests.support import fakes

BLOCK = 16
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GRADE, PREDICTED, HOME = "x-warmroute-grade", "x-warmroute-predicted-cached-tokens", "x-warmroute-replica"


@asynccontextmanager
async def replicas(
    count: int = 2, *, kv_tokens: int = 8_192, events: bool = True, member: Member = DENSE
) -> AsyncIterator[Engines]:
    """Simulated replicas with room for a few prompts."""
    engines = Engines(
        EngineSettings(
            replicas=count,
            port=0,
            time_scale=500.0,
            kv_tokens=kv_tokens,
            member=member,
            limits=Limits(block_tokens=BLOCK, context_tokens_max=4_096),
            kv_events=KvEventsSettings(0, 0) if events else None,
        )
    )
    await engines.start()
    try:
        async with ClientSession() as client:
            for url in engines.urls:  # a stream begins with its first batch
                body = {"model": "sim", "prompt": f"{url:>128}", "max_tokens": 2}
                async with client.post(url + COMPLETIONS, json=body) as response:
                    assert response.status == 200
        yield engines
    finally:
        await engines.stop()


@asynccontextmanager
async def routing(*urls: str, **overrides: Any) -> AsyncIterator[RouterServer]:
    """A router that has found out what there is to find out."""
    async with RouterServer(resolve(fakes.settings(*urls, tokens__deadline_s=20.0, **overrides))) as app:
        await app.control.probe_now()
        yield app


async def graded(app: RouterServer, grade: Confidence) -> None:
    """Return when every replica has this grade."""
    async with asyncio.timeout(60):
        while any(member.grade is not grade for member in app.router.fleet.members.values()):
            await asyncio.sleep(0.01)


async def caught_up(app: RouterServer, engines: Engines) -> None:
    """Return when the engines have nothing to do, and what they published has been heard."""
    assert app.control.events is not None
    published = dict(zip(engines.urls, engines.publishers, strict=True))
    async with asyncio.timeout(60):
        while any(each.model.running_n or each.model.waiting_n for each in engines.replicas) or any(
            stats.last_seq < published[url]._seq - 1 for url, stats in app.control.events.stats().items()
        ):
            await asyncio.sleep(0.01)


async def ask(
    client: ClientSession, app: RouterServer, path: str, body: dict[str, Any]
) -> tuple[str, int, int, str, str]:
    """(grade, predicted, actual, replica, text of the answer)."""
    async with client.post(app.url + path, json={"model": "sim", "max_tokens": 8, **body}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        actual = (answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return response.headers[GRADE], int(response.headers[PREDICTED]), actual, response.headers[HOME], text


@pytest.fixture
async def client() -> AsyncIterator[ClientSession]:
    """An HTTP client."""
    async with ClientSession() as session:
        yield session


async def test_predictions_are_exact_while_the_engine_evicts(client: ClientSession) -> None:
    """Sixty prompts through caches that hold a few: every prediction equals the engine's own count."""
    async with replicas(2, kv_tokens=4_096) as engines, routing(*engines.urls) as app:
        await graded(app, Confidence.EXACT)
        hits = 0
        for n in range(60):
            prompt = f"{n if n % 2 else n % 6:04d}" * 600 + f"{n % 4:04d}" * (n % 5 * 40)
            grade, predicted, actual, _, _ = await ask(client, app, COMPLETIONS, {"prompt": prompt})
            assert grade == "exact"
            assert predicted == actual, n
            hits += actual
            await caught_up(app, engines)
        assert hits > 0
        rows = [app.router.knowledge.engine_blocks(url) for url in engines.urls]
        assert all(row is not None and row.removed > 100 and not row.unknown_removals for row in rows)


async def test_a_conversation_with_salt_is_its_own(client: ClientSession) -> None:
    """The salt is part of the identity, in the events as in our keys."""
    async with replicas(1) as engines, routing(*engines.urls) as app:
        await graded(app, Confidence.EXACT)
        for salt in ("one", "two", None):
            for turn in range(2):
                body: dict[str, Any] = {"prompt": "abcd" * 200}
                grade, predicted, actual, _, _ = await ask(
                    client, app, COMPLETIONS, body | ({"cache_salt": salt} if salt else {})
                )
                await caught_up(app, engines)
                assert (grade, predicted) == ("exact", actual)
                assert (actual > 0) is (turn > 0)


async def test_traffic_around_the_router_is_seen(client: ClientSession) -> None:
    """What others sent to a replica counts as held: the estimate alone could not know."""
    async with replicas(2) as engines, routing(*engines.urls) as app:
        await graded(app, Confidence.EXACT)
        body = {"model": "sim", "prompt": "wxyz" * 500, "max_tokens": 4}
        async with client.post(engines.urls[1] + COMPLETIONS, json=body) as response:
            assert response.status == 200
        await caught_up(app, engines)
        grade, predicted, actual, home, _ = await ask(client, app, COMPLETIONS, {"prompt": "wxyz" * 500})
        assert (grade, home) == ("exact", engines.urls[1])
        assert predicted == actual > 0


async def test_a_new_router_knows_all_from_the_replay(client: ClientSession) -> None:
    """It was not there when the blocks were stored, and is exact all the same."""
    async with replicas(2) as engines:
        async with routing(*engines.urls) as app:
            await graded(app, Confidence.EXACT)
            _, _, _, home, _ = await ask(client, app, COMPLETIONS, {"prompt": "efgh" * 500})
        async with routing(*engines.urls) as app:
            await graded(app, Confidence.EXACT)
            grade, predicted, actual, again, _ = await ask(client, app, COMPLETIONS, {"prompt": "efgh" * 500})
            assert (grade, again) == ("exact", home)
            assert predicted == actual > 0


async def test_a_chat_is_tokenized_by_the_replica(client: ClientSession) -> None:
    """Without a tokenizer here, the engine's own /tokenize gives the ids of a chat."""
    async with replicas(2) as engines, routing(*engines.urls) as app:
        await graded(app, Confidence.EXACT)
        messages = [{"role": "user", "content": "tell me more " * 80}]
        for turn in range(4):
            grade, predicted, actual, _, text = await ask(client, app, CHAT, {"messages": messages})
            await caught_up(app, engines)
            assert (grade, predicted) == ("exact", actual)
            assert (actual > 0) is (turn > 0)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then? " * 20}]


async def test_a_prompt_that_cannot_be_known_is_estimated(client: ClientSession) -> None:
    """Two prompts in one request have no one prefix; the grade says so."""
    async with replicas(2) as engines, routing(*engines.urls) as app:
        await graded(app, Confidence.EXACT)
        body = {"model": "sim", "prompt": ["abcd" * 100, "efgh" * 100], "max_tokens": 2}
        async with client.post(app.url + COMPLETIONS, json=body) as response:
            assert response.headers[GRADE] == "estimated"


async def test_events_can_be_left_alone(client: ClientSession) -> None:
    """`events.enabled: false`, or an engine without events: everything is estimated, and says why."""
    async with replicas(1) as engines, routing(*engines.urls, events__enabled=False) as app:
        grade, *_ = await ask(client, app, COMPLETIONS, {"prompt": "abcd" * 100})
        assert grade == "estimated"
    async with replicas(1, events=False) as engines, routing(*engines.urls) as app:
        grade, *_ = await ask(client, app, COMPLETIONS, {"prompt": "abcd" * 100})
        assert grade == "estimated"
        async with client.get(app.admin_url + "/admin/replicas") as response:
            (row,) = (await response.json())["replicas"]
        assert row["grade"] == "estimated"
        assert row["grade_why"]


async def test_grades_are_metrics(client: ClientSession) -> None:
    """Grade, predictions against actual counts, and the stream's own figures."""
    async with replicas(1) as engines, routing(*engines.urls) as app:
        await graded(app, Confidence.EXACT)
        await ask(client, app, COMPLETIONS, {"prompt": "abcd" * 100})
        await caught_up(app, engines)
        async with client.get(app.admin_url + "/metrics") as response:
            page = await response.text()
        assert f'warmroute_replica_grade{{grade="exact",replica="{engines.urls[0]}"}} 1.0' in page
        assert 'warmroute_predictions_total{grade="exact",result="equal"} 1.0' in page
        assert 'warmroute_prediction_confidence_total{grade="exact"} 1.0' in page
        assert f'warmroute_replica_event_gaps_total{{replica="{engines.urls[0]}"}} 0.0' in page
        async with client.get(app.admin_url + "/admin/replicas") as response:
            (row,) = (await response.json())["replicas"]
        assert row["events"]["blocks"] > 0
        assert row["events"]["block_tokens"] == BLOCK
