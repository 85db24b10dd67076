"""Why a request missed the cache, as clients, pages and metrics are told: it adds up everywhere.

The replicas are scripted ones, and those of `python -m loadtest engine`, which evict by themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.core.types.cache_misses import Difference, DifferenceKind, MissReason, PromptAnalysis
from router.router_server import RouterServer
from tests.engines.test_exact import replicas, routing
from tests.support.fakes import FakeEngine, reset, running, status
from tests.support.keyring import Keyring, bearer

pytestmark = pytest.mark.promise("No reason in a header shows an isolated tenant what another requested.", "tenants")

CHAT, SCORE = "/v1/chat/completions", "/v1/score"
LONG, OTHER = "tell me more " * 300, "something else " * 300
MISS, PREDICTED = "x-warmroute-miss", "x-warmroute-predicted-cached-tokens"


@dataclass
class Seen:
    """Stands in for what earlier texts say: every prompt is seen like this."""

    sighting: PromptAnalysis
    unexplained: int = 0

    def inspect(self, *_: Any, **__: Any) -> PromptAnalysis:
        """Whatever it is."""
        return self.sighting


def seen(app: RouterServer, sighting: PromptAnalysis) -> None:
    """From now on the router's texts say this of every prompt."""
    app.http.reader._observer = Seen(sighting)  # type: ignore[assignment]


def misses_of(header: str) -> dict[str, int]:
    """Tokens by reason."""
    return {name: int(tokens) for name, _, tokens in (each.partition("=") for each in header.split(","))}


async def decisions(client: ClientSession, app: RouterServer) -> list[dict[str, Any]]:
    """Newest first."""
    async with client.get(app.admin_url + "/admin/decisions") as response:
        rows: list[dict[str, Any]] = (await response.json())["decisions"]
        return rows


async def ask(client: ClientSession, app: RouterServer, *texts: str, path: str = CHAT, **more: Any) -> dict[str, int]:
    """What the header says of a request; with the tokens predicted it adds up to the prompt's, and what is on record
    to those that the engine counted."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    body = {"model": "m", "max_tokens": 2, "messages": messages, **more}
    async with client.post(app.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
        told = misses_of(response.headers[MISS])
        predicted = int(response.headers[PREDICTED])
    (row, *_) = await decisions(client, app)
    assert predicted + sum(told.values()) == row["prompt_tokens"]
    settled = row["usage"]["prompt_tokens"] if row["usage"] else row["prompt_tokens"]
    assert row["hit_tokens"] + sum(row["miss"].values()) == settled
    return told


async def test_cold_new_and_tail(client: ClientSession, engine: FakeEngine) -> None:
    """The first prompt is cold, the next turn new behind it; what the engine found is what is on record."""
    async with running(engine) as app:
        assert set(await ask(client, app, LONG)) == {MissReason.COLD, MissReason.TAIL}
        assert set(await ask(client, app, LONG, "answer", OTHER)) == {MissReason.NEW, MissReason.TAIL}
        (row, first) = await decisions(client, app)
    assert first["hit_tokens"] == row["hit_tokens"] == 32  # of 100, by the engine
    assert row["miss"].keys() == {MissReason.MISPREDICTED, MissReason.NEW, MissReason.TAIL}


async def test_spilled_and_what_is_lost_with_a_replica(client: ClientSession) -> None:
    """A prompt that another replica holds is spilled; when both have restarted, it is lost."""
    engines = [FakeEngine(metrics=counters(500)) for _ in range(2)]
    async with engines[0], engines[1], running(*engines, routing__policy="round_robin") as app:
        await ask(client, app, LONG)
        assert set(await ask(client, app, LONG)) == {MissReason.SPILLED, MissReason.TAIL}
        for each in engines:
            each.metrics = counters(1)
        await app.control.probe_now()
        assert set(await ask(client, app, LONG)) == {MissReason.REPLICA_LOST, MissReason.TAIL}


def counters(prompt_tokens: int) -> str:
    """A metrics page of vLLM's, as far as it tells of a restart."""
    return f'vllm:num_requests_running 0\nvllm:prompt_tokens_total{{model_name="m"}} {prompt_tokens}\n'


async def test_evicted_by_a_simulated_engine(client: ClientSession) -> None:
    """A replica whose cache has room for one such prompt dropped the first for the second: so says the router, and the
    engine finds nothing of it either."""
    async with replicas(1, kv_tokens=1_536, events=False) as engines, routing(*engines.urls) as app:
        for text in (LONG, OTHER):
            await ask(client, app, text, model="sim")
        told = await ask(client, app, LONG, model="sim")
        (row, *_) = await decisions(client, app)
    assert told[MissReason.EVICTED] > 300
    assert row["miss"][MissReason.EVICTED] > 300


async def test_unsupported(client: ClientSession, engine: FakeEngine) -> None:
    """A prompt that the router does not read has that for a reason, and nobody says whether it is a replay."""
    async with running(engine) as app:
        for _ in range(2):
            assert set(await ask(client, app, path=SCORE, text_1=LONG)) == {MissReason.UNSUPPORTED}
        async with client.get(app.url + "/metrics") as response:
            page = await response.text()
    assert "\nwarmroute_replays_total 0.0\n" in page
    assert "warmroute_prompt_diversity 1" not in page


@pytest.mark.inside  # an observer of its own
async def test_what_texts_say_is_told(client: ClientSession, engine: FakeEngine) -> None:
    """What diverged, and what another identity has, is in the header; where it diverged is on record: names and
    numbers, and no text."""
    difference = Difference(
        DifferenceKind.TIMESTAMP, 0, "system", "messages[0].content", 90, 41, 2_000, "00:00", 2**64 - 1
    )
    async with running(engine) as app:
        seen(app, PromptAnalysis(repeated_bytes=2_000, template=7, conversation=8, turn=3, difference=difference))
        assert (await ask(client, app, LONG))[MissReason.DIVERGED] == 500
        (row, *_) = await decisions(client, app)
        seen(app, PromptAnalysis(identity_bytes=2_048))
        assert (await ask(client, app, OTHER))[MissReason.IDENTITY] > 100
    assert (row["template"], row["conversation"], row["turn"]) == (f"{7:016x}", f"{8:016x}", 3)
    named = row["difference"].pop("piece_hash")
    assert len(named) == 16
    assert int(named, 16) != difference.piece_hash, "a plain hash of a few digits is as good as the digits"
    assert row["difference"] == {
        "change": "timestamp",
        "message": 0,
        "role": "system",
        "path": "messages[0].content",
        "offset_bytes": 90,
        "at_bytes": 41,
        "lost_bytes": 2_000,
        "shape": "00:00",
        "before": "",
        "after": "",
        "token_bytes": -1,
    }


@pytest.mark.inside  # an observer of its own
@pytest.mark.parametrize("isolate", [True, False])
async def test_an_isolated_tenant_hears_of_nobody_else(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, isolate: bool
) -> None:
    """That the same prompt was asked for by another is told to a tenant who shares caches, and on record for the
    operator; to one who does not, it is cold."""
    engine.owned_by = "vllm"
    ring = Keyring(tmp_path, acme={"receipts": True})
    async with running(engine, auth__isolate=isolate, **ring.settings) as app:
        seen(app, PromptAnalysis(identity_bytes=2_048))
        body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
        async with client.post(app.url + CHAT, json=body, headers=ring.of("acme")) as response:
            assert response.status == 200, await response.text()
            told = misses_of(response.headers[MISS])
        headers = bearer(app.control.admin_token)
        async with client.get(app.admin_url + "/admin/decisions", headers=headers) as page:
            (row,) = (await page.json())["decisions"]
    assert (MissReason.IDENTITY in told) is not isolate
    assert (MissReason.COLD in told) is isolate
    assert row["miss"][MissReason.IDENTITY] > 0


@pytest.mark.parametrize("salt", [None, "pepper"])
async def test_nobody_hears_of_who_is_kept_apart(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, salt: str | None
) -> None:
    """What an isolated tenant has asked for, or one with a salt of its own, is cold to all others, who may only
    guess; the operator has it on record."""
    engine.owned_by = "vllm"
    ring = Keyring(tmp_path, apart={"isolate": salt is None, "receipts": True}, spy={"receipts": True})
    body = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "hi"}]}
    told = []
    async with running(engine, **ring.settings) as app:
        for tenant, more in (("apart", {"cache_salt": salt} if salt else {}), ("spy", {})):
            async with client.post(app.url + CHAT, json=body | more, headers=ring.of(tenant)) as response:
                assert response.status == 200, await response.text()
                told.append(response.headers[MISS])
        headers = bearer(app.control.admin_token)
        async with client.get(app.admin_url + "/admin/decisions", headers=headers) as page:
            row, _ = (await page.json())["decisions"]
    assert [set(misses_of(header)) for header in told] == [{MissReason.COLD, MissReason.TAIL}] * 2
    assert row["miss"][MissReason.IDENTITY] > 0


async def test_two_kinds_of_hits(client: ClientSession, engine: FakeEngine) -> None:
    """The very prompt again is a replay, one message more is not: hits are counted apart, and what part of prompts is
    no replay. A prompt that was retried was asked for once. Reasons in metrics add up with hits to what was counted."""
    async with FakeEngine() as second, running(engine, second) as app:
        engine.script.append(reset)
        second.script = engine.script  # whoever is asked first
        await ask(client, app, LONG)
        await ask(client, app, LONG)
        await ask(client, app, LONG, "answer", "more")
        async with client.get(app.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        rows = await decisions(client, app)
    assert [row["hit"] for row in rows] == ["genuine", "replay", "genuine"]
    assert [len(row["retries"]) for row in rows] == [0, 0, 1]
    figures = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    assert figures['warmroute_hit_tokens_total{kind="genuine",model="m"}'] == 64
    assert figures['warmroute_hit_tokens_total{kind="replay",model="m"}'] == 32
    assert figures["warmroute_duplicate_prompts_total"] == 1
    assert round(figures["warmroute_prompt_diversity"], 3) == 0.667
    missed = [figures[f'warmroute_miss_tokens_total{{model="m",reason="{miss}"}}'] for miss in MissReason]
    assert sum(missed) + 96 == 300
    assert all(f'warmroute_prompt_divergences_total{{change="{change}"}}' in figures for change in DifferenceKind)


async def test_what_was_refused_was_not_computed(client: ClientSession, engine: FakeEngine) -> None:
    """A prompt that the engine refuses, or fails on, has no reasons on record, and adds nothing to metrics."""
    async with running(engine, upstream__retries_max=0) as app:
        for code in (400, 500):
            engine.script.append(status(code))
            async with client.post(app.url + CHAT, json={"model": "m", "messages": []}) as response:
                assert response.status in (code, 502)
        rows = await decisions(client, app)
        async with client.get(app.url + "/metrics") as page:
            text = await page.text()
    assert [row["miss"] for row in rows] == [None, None]
    assert all(f'warmroute_miss_tokens_total{{model="m",reason="{miss}"}} 0.0' in text for miss in MissReason)


async def test_without_an_observatory_nothing_is_said(client: ClientSession, engine: FakeEngine) -> None:
    """No header, no reasons on record, no cost."""
    async with running(engine, insights__enabled=False) as app:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}]})
        async with client.post(app.url + CHAT, data=body) as response:
            assert MISS not in response.headers
        (row,) = await decisions(client, app)
    assert row["miss"] is row["hit_tokens"] is row["hit"] is None
