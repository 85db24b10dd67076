"""Data-parallel ranks: a server of several is several replicas, behind one URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from aiohttp import web

from router.config.schema import ProbeSettings, UpstreamSettings
from router.core.dialects.rank_field import RANK_HEADER, for_rank
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.replicas import CapacitySource, Load, Replica
from router.engines.metrics_page import MetricsPages
from router.engines.probe import Prober
from router.engines.ranks import RankExpander, expand
from router.http.exchange import UpstreamResponse
from router.http.failures import ReplicaUnreachable
from router.http.upstream import Upstream
from tests.support.discovered import Told
from tests.support.fakes import FakeEngine, mute

METRICS = """\
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 7.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="200"} 1.0
"""
SOURCES = {"0": {"publisher": "zmq"}, "1": {"publisher": "zmq"}}


@pytest.fixture
async def ranks() -> AsyncIterator[RankExpander]:
    """Asks again at once."""
    async with asyncio.timeout(60):
        found = asking(interval_s=0.01, models_interval_s=0.0, api_key="k")
        yield found
        await found.close()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    """Connections to engines."""
    made = Upstream(UpstreamSettings(connect_timeout_s=60.0, first_byte_timeout_s=60.0), whole_bytes_max=1 << 20)
    yield made
    await made.close()


@pytest.fixture
async def router(engine: FakeEngine) -> Router:
    """Two ranks of one server are known."""
    found = Router(POLICIES["warm"](), index_bytes_max=1 << 20, remembered_prompts_max=100, default_cache_blocks=100)
    found.replace(sorted(expand([Replica(engine.url)], {engine.url: 2}), key=lambda replica: replica.id))
    return found


class AskingRanks(RankExpander):
    """Ranks with a reader of metrics of their own."""

    async def close(self) -> None:
        """Close both."""
        await super().close()
        await self._pages.close()


def asking(**given: Any) -> RankExpander:
    """Ranks that are asked for at these intervals."""
    settings = ProbeSettings(**given)
    return AskingRanks(settings, MetricsPages(settings))


async def probe(router: Router, ids: Iterable[str]) -> list[str]:
    """One round of each; returns who was found lost."""
    lost: list[str] = []
    settings = ProbeSettings(interval_s=9.0, models_interval_s=9.0)
    pages = MetricsPages(settings)
    prober = Prober(router, lost.append, settings=settings, pages=pages, kv_tokens_max=0)
    for id_ in ids:
        await prober.probe(id_, models=True)
    await prober.close()
    await pages.close()
    return lost


async def sets_of(*replicas: str) -> AsyncIterator[frozenset[Replica]]:
    """A discovery that ends."""
    yield frozenset(map(Replica, replicas))


@pytest.mark.promise("A page without sources of events makes no data-parallel ranks.", "engines")
@pytest.mark.parametrize(
    ("sources", "info", "metrics", "count"),
    [
        (SOURCES, None, None, 2),
        (
            {"2": {"publisher": "null"}, "3": {"publisher": "zmq"}},
            None,
            None,
            2,
        ),  # vLLM's hybrid mode: the second half of four
        ({}, None, METRICS, 2),
        ({}, {"dp_size": 4}, METRICS, 4),
        (None, {"dp_size": 4, "kv_events": None}, None, 4),
        (None, {"vllm_config": "..."}, METRICS, 2),
        (None, None, None, 1),
        ({"status": "ok", "version": "1"}, None, None, 1),
        ({"status": {}, "version": {}}, None, None, 1),
        ({"0": {}, "1": {}, "2": {"publisher": "zmq"}}, None, None, 1),
        ({str(n): {"id": n} for n in range(1_000)}, {"dp_size": 2}, None, 2),
        ({"0": "tcp://*:5557", "1": "tcp://*:5558"}, None, METRICS, 2),
        ({"-1": {"publisher": "zmq"}, "0": {"publisher": "zmq"}}, None, None, 1),
        ({"2": {"endpoint": "tcp://*:5557"}, "3": {"endpoint": "tcp://*:5558"}}, None, None, 2),
        (None, {"dp_size": 10**6}, None, 1),
        (None, {"dp_size": 0}, None, 1),
        (None, {"dp_size": "many"}, "sglang:num_running_reqs 3", 1),
    ],
)
async def test_a_server_says_how_many(
    engine: FakeEngine, ranks: RankExpander, sources: dict | None, info: dict | None, metrics: str | None, count: int
) -> None:
    """From vLLM's sources of events or its metrics, from SGLang's server_info, else one. What is no source counts for
    none: a server that answers every path with an object of some fields is one replica."""
    engine.kv_event_sources, engine.server_info, engine.metrics = sources, info, metrics
    assert await ranks.count(engine.url) == count


@pytest.mark.parametrize(
    ("sources", "info", "page", "version"),
    [
        (SOURCES, None, {"version": "0.32.0"}, "0.32.0"),
        (None, {"version": "0.5.23"}, None, "0.5.23"),
        (None, {"dp_size": 2, "version": "0.5.23"}, {"version": "of something else"}, "0.5.23"),
        (None, {"dp_size": 2}, None, ""),
        (None, {"dp_size": 2, "version": 7}, {"version": ["0"]}, ""),
        (None, None, {"version": "0" * 65}, ""),
        (None, None, {"version": "0\n1"}, ""),
        (None, None, {}, ""),
    ],
)
async def test_a_server_says_its_version(
    engine: FakeEngine, ranks: RankExpander, sources: dict | None, info: dict | None, page: dict | None, version: str
) -> None:
    """From SGLang's server_info or vLLM's page; what is no short printable text is none, and costs no rank."""
    engine.kv_event_sources, engine.server_info, engine.version = sources, info, page
    count = await ranks.count(engine.url)
    assert ranks.version(engine.url) == version
    assert count == (2 if sources else (info or {}).get("dp_size", 1))


async def test_a_version_is_the_last_that_was_told(engine: FakeEngine, ranks: RankExpander) -> None:
    """An upgrade in place is seen when the server is asked again; a server that is down keeps its version."""
    engine.version = {"version": "0.31.0"}
    await ranks.count(engine.url)
    engine.version = {"version": "0.32.0"}
    await ranks.count(engine.url)
    await engine.stop()
    await ranks.count(engine.url)
    assert ranks.version(engine.url) == "0.32.0"


async def test_silence_changes_nothing(engine: FakeEngine, ranks: RankExpander) -> None:
    """A server that is down keeps its ranks; one never heard has one."""
    engine.kv_event_sources = SOURCES
    assert await ranks.count(engine.url) == 2
    await engine.stop()
    assert await ranks.count(engine.url) == 2
    assert await ranks.count("http://127.0.0.1:1") == 1


def test_a_rank_is_a_replica() -> None:
    """Its id names server and rank; its URL is the server's. Ids without ranks are as ever."""
    given = [Replica("http://a:1"), Replica("http://b:1"), Replica("http://c:1#dp0")]
    made = sorted(expand(given, {"http://b:1": 2, "http://a:1": 1, "http://c:1": 2}), key=lambda each: each.id)
    assert [each.id for each in made] == ["http://a:1", "http://b:1#dp0", "http://b:1#dp1", "http://c:1#dp0"]
    assert [each.url for each in made] == ["http://a:1", "http://b:1", "http://b:1", "http://c:1"]
    assert [each.rank for each in made] == [None, 0, 1, 0]


async def test_ranks_take_the_place_of_their_server(engine: FakeEngine, other: FakeEngine, ranks: RankExpander) -> None:
    """A set arrives expanded, and again when a server that comes back has another number of ranks."""
    engine.kv_event_sources = SOURCES
    found = ranks.follow(sets_of(engine.url, other.url))
    assert {each.id for each in await anext(found)} == {f"{engine.url}#dp0", f"{engine.url}#dp1", other.url}
    engine.kv_event_sources = {}
    assert {each.id for each in await anext(found)} == {engine.url, other.url}
    other.server_info = {"dp_size": 3}
    assert len(await anext(found)) == 4
    await found.aclose()  # type: ignore[attr-defined]


async def test_a_server_is_asked_again_when_in_doubt(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known numbers are asked for seldom, but soon after the server was lost."""
    seldom = asking(interval_s=0.01, models_interval_s=3_600.0)
    found = seldom.follow(sets_of(engine.url))
    assert len(await anext(found)) == 1
    engine.kv_event_sources = SOURCES
    coming = asyncio.ensure_future(anext(found))
    asked = engine.probes["metrics"]
    rounds, refresh = asyncio.Semaphore(0), seldom._refresh

    def counted(replicas: frozenset[Replica]) -> None:
        refresh(replicas)
        rounds.release()

    monkeypatch.setattr(seldom, "_refresh", counted)
    for _ in range(3):
        await rounds.acquire()
    assert not coming.done()
    assert engine.probes["metrics"] == asked
    seldom.invalidate(f"{engine.url}#dp1")
    assert len(await coming) == 2
    await found.aclose()  # type: ignore[attr-defined]
    await seldom.close()


async def test_a_silent_server_holds_nobody_up(engine: FakeEngine, ranks: RankExpander) -> None:
    """A set is passed on with what is known after a second, while a server that hangs is still being asked."""
    hung = FakeEngine()
    asked = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await hung.go_on.wait()
        return web.json_response(SOURCES)

    hung._sources = hang  # type: ignore[method-assign]
    async with hung:
        engine.kv_event_sources = SOURCES
        found = ranks.follow(sets_of(engine.url, hung.url))
        assert len(await anext(found)) == 3
        assert asked.is_set()
        hung.go_on.set()
        assert len(await anext(found)) == 4
        await found.aclose()  # type: ignore[attr-defined]


async def test_one_round_serves_all_ranks(engine: FakeEngine, router: Router) -> None:
    """A server is asked once a round; each rank hears its own load, and all are ready."""
    engine.metrics = METRICS
    assert await probe(router, router.fleet.members) == []
    assert engine.probes == {"health": 1, "models": 1, "metrics": 1, "is_sleeping": 1}
    loads = [member.load for member in router.fleet.members.values()]
    assert loads == [
        Load(running=1, kv_tokens_max=1_600, block_tokens=16, kv_source=CapacitySource.PRODUCT, kv_blocks=100),
        Load(running=7, kv_tokens_max=3_200, block_tokens=16, kv_source=CapacitySource.PRODUCT, kv_blocks=200),
    ]
    assert [set(member.models) for member in router.fleet.ready()] == [{"m"}, {"m"}]


async def test_a_lost_server_loses_all_ranks(engine: FakeEngine, router: Router) -> None:
    """Refused once: every rank of it is out at once."""
    await probe(router, router.fleet.members)
    await engine.stop()
    assert await probe(router, router.fleet.members) == [f"{engine.url}#dp0", f"{engine.url}#dp1"]
    assert router.fleet.ready() == []


async def call(upstream: Upstream, replica: str, path: str, body: bytes, **headers: str) -> UpstreamResponse:
    """One request."""
    lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
    rank = Replica(replica).rank
    if rank is not None:
        lines, body = for_rank(rank, path.partition("?")[0], lines, body)
    answer = await upstream.call(replica, "POST", path, lines, body, whole=True)
    upstream.done(answer)
    return answer


async def test_a_request_names_its_rank(engine: FakeEngine, upstream: Upstream) -> None:
    """In a header, whatever the client asked for; the body passes byte for byte. No rank, no header."""
    body = b'{"model": "m"}'
    for rank in ("", "#dp0", "#dp1"):
        await call(upstream, engine.url + rank, "/v1/completions?a=b", body, **{"x-DATA-parallel-rank": "9"})
    assert [seen.headers.getall(RANK_HEADER) for seen in engine.seen] == [["9"], ["0"], ["1"]]
    assert {seen.path for seen in engine.seen} == {"/v1/completions?a=b"}
    assert {seen.body for seen in engine.seen} == {body}


async def test_generate_takes_its_rank_in_the_body(engine: FakeEngine, upstream: Upstream) -> None:
    """SGLang reads no header there: the rank is spliced in, and the rest of the body stays as it was."""
    await call(upstream, engine.url + "#dp1", "/generate", b'{"text": "a"}')
    await call(upstream, engine.url, "/generate", b'{"text": "a"}')
    assert [seen.body for seen in engine.seen] == [b'{"text": "a","routed_dp_rank":1}', b'{"text": "a"}']


async def test_silent_requests_of_all_ranks_end(engine: FakeEngine, upstream: Upstream) -> None:
    """One rank's server refuses connections: what waits for any of its ranks is free to go elsewhere."""
    engine.script.append(mute)
    waiting = asyncio.ensure_future(call(upstream, engine.url + "#dp1", "/v1/completions", json.dumps({}).encode()))
    await engine.at_work.wait()
    upstream.fail_silent_calls("http://127.0.0.1:1#dp1")
    upstream.fail_silent_calls(engine.url + "#dp0")
    with pytest.raises(ReplicaUnreachable):
        await waiting


class Hung(FakeEngine):
    """Says how many ranks it has only when it is told to go on."""

    async def _sources(self, request: web.Request) -> web.Response:
        self.at_work.set()
        await self.go_on.wait()
        return await super()._sources(request)


async def test_who_leaves_is_not_held_up(
    engine: FakeEngine, other: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that leaves is gone at once, though another one joins that does not answer; that one joins when it has
    been waited for, and those that come meanwhile do not wait for it."""
    monkeypatch.setattr("router.engines.ranks.SETTLE_S", 3_600.0)
    seldom = asking(interval_s=3_600.0, models_interval_s=3_600.0, timeout_s=60.0)
    sets = Told()
    async with Hung() as hung:
        found = seldom.follow(sets.watch())
        sets.say(Replica(engine.url), Replica(other.url))
        assert len(await anext(found)) == 2
        sets.say(Replica(engine.url), Replica(other.url), Replica(hung.url))
        coming = asyncio.ensure_future(anext(found))
        await hung.at_work.wait()
        assert not coming.done()
        sets.say(Replica(engine.url), Replica(hung.url))
        assert await coming == {Replica(engine.url)}
        sets.say(Replica(engine.url, name="ns/a"), Replica(hung.url))
        assert await anext(found) == {Replica(engine.url, name="ns/a")}
        hung.kv_event_sources = SOURCES
        hung.go_on.set()
        assert {each.id for each in await anext(found)} == {engine.url, f"{hung.url}#dp0", f"{hung.url}#dp1"}
        await found.aclose()  # type: ignore[attr-defined]
    await seldom.close()
    assert sets.closed == 1


async def test_another_engine_is_asked_anew(engine: FakeEngine) -> None:
    """What was known of a former engine at an address is asked of the next at once; ranks keep what discovery knows. An
    instance that becomes known is no other engine."""
    seldom = asking(interval_s=3_600.0, models_interval_s=3_600.0, timeout_s=60.0)
    sets = Told()
    found = seldom.follow(sets.watch())
    engine.version = {"version": "0.31.0"}
    sets.say(Replica(engine.url))
    assert len(await anext(found)) == 1
    engine.kv_event_sources = SOURCES
    first, second = Replica(engine.url, "uid-1", "ns/a", "node"), Replica(engine.url, "uid-2", "ns/b", "node")
    sets.say(first)
    assert await anext(found) == {first}
    assert seldom.version(engine.url) == "0.31.0"
    engine.version = {"version": "0.32.0"}
    sets.say(second)
    assert await anext(found) == frozenset(), "the former is gone while the next is asked"
    assert await anext(found) == {second.select_rank(0), second.select_rank(1)}
    assert seldom.version(engine.url) == "0.32.0"
    await found.aclose()  # type: ignore[attr-defined]
    await seldom.close()
