"""The pages of the observatory, of a whole router before simulated engines."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession

from loadtest.fake_engine.command import Engines, EngineSettings
from router.core.insights.ledger import template_tree
from router.core.insights.ledger.timeline import STEPS
from router.core.types.cache_misses import Difference, DifferenceKind, MissReason, Template
from router.router_server import RouterServer
from router.telemetry.request_record import RequestRecord
from tests.support.fakes import FakeEngine, running, status

pytestmark = pytest.mark.promise("No page quotes prompt texts without `insights.excerpts`.", "records")

CHAT = "/v1/chat/completions"
CANARY = "the canary sings at dawn"
HEAD = "You answer in few words, and never in rhyme. " * 60


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    """Two of them, quick."""
    async with Engines(EngineSettings(replicas=2, port=0, time_scale=500.0)) as both:
        yield both


async def page(client: ClientSession, app: RouterServer, name: str) -> dict[str, Any]:
    """One of the admin listener's."""
    async with client.get(f"{app.admin_url}/admin/{name}") as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        found: dict[str, Any] = await response.json()
        return found


async def metrics(client: ClientSession, app: RouterServer) -> dict[str, float]:
    """Sums over all label values but those of histograms' buckets."""
    sums: dict[str, float] = {}
    async with client.get(f"{app.admin_url}/metrics") as response:
        for line in (await response.text()).splitlines():
            found = re.match(r"(\w+)(?:\{.*\})? (\S+)$", line)
            if found and "_bucket" not in found[1]:
                sums[found[1]] = sums.get(found[1], 0.0) + float(found[2])
    return sums


async def chat(client: ClientSession, app: RouterServer, *texts: str, stream: bool = False) -> None:
    """A conversation so far, on the shared system prompt."""
    messages = [{"role": "system", "content": HEAD}]
    messages += [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]
    body = {"model": "sim", "messages": messages, "max_tokens": 4, "stream": stream}
    async with client.post(app.url + CHAT, json=body) as response:
        assert response.status == 200
        await response.read()


async def test_pages_agree_with_metrics(client: ClientSession, engines: Engines) -> None:
    """Totals, the timeline, groups and decisions of the overview are the same requests that Prometheus is told of, and
    every prompt token is a hit or has a reason."""
    async with running(*engines.urls, api__ask_usage=False) as app:
        for number in range(6):
            await chat(client, app, f"question {number} " * 50, stream=number % 2 == 0)
        await chat(client, app, "question 0 " * 50)
        shown, counted = await page(client, app, "observatory"), await metrics(client, app)
        totals, points = shown["totals"], shown["timeline"]["points"]
        assert totals["requests"] == counted["warmroute_requests_total"] == 7
        assert totals["predicted_tokens"] == counted["warmroute_predicted_cached_tokens_total"] > 0
        assert totals["hit_tokens"] + sum(totals["misses"].values()) == totals["prompt_tokens"] > 0
        assert set(totals["misses"]) == set(MissReason)
        assert totals["genuine_tokens"] + totals["replay_tokens"] == totals["hit_tokens"]
        assert 0 < totals["ttft_p50_s"] <= totals["ttft_p90_s"] <= totals["ttft_p99_s"]
        assert len(points) == STEPS
        assert 0 < totals["verified_tokens"] < totals["prompt_tokens"]  # three streamed, and their engine told nothing
        for name in {*points[0]} & {*totals} - {"misses"} - {name for name in totals if name.startswith("ttft")}:
            assert sum(point[name] for point in points) == totals[name]
        assert sum(group["requests"] for group in shown["groups"]) == counted["warmroute_group_requests_total"] == 7
        for name, metric in (("prompt_tokens", "prompt"), ("hit_tokens", "hit")):
            assert counted[f"warmroute_group_{metric}_tokens_total"] == totals[name]
        assert counted["warmroute_group_ttft_seconds_count"] == counted["warmroute_ttft_seconds_count"] == 3
        assert {row["id"] for row in shown["replicas"]} == set(engines.urls)
        assert all(row["models"] == ["sim"] for row in shown["replicas"])
        (row,) = (row for row in shown["models"] if row["model"] == "sim")
        same = ("requests", "prompt_tokens", "hit_tokens", "verified_tokens", "verified_hit_tokens")
        assert {name: row[name] for name in same} == {name: totals[name] for name in same}
        assert (row["failed"], row["in_flight"], row["waiting"], row["completion_tokens"]) == (0, 0, 0, 28)
        assert all(row["ready"] and row["state"] == "closed" and not row["warming"] for row in shown["replicas"])
        decisions = await page(client, app, "decisions")
        assert shown["decisions"] == decisions["decisions"]
        assert shown["excerpts"] is False


async def test_templates_and_who_holds_them(client: ClientSession, engines: Engines) -> None:
    """Data of frontends is on the map and in the list, with the holders of its last block."""
    async with running(*engines.urls) as app:
        await chat(client, app, "one " * 400)
        observatory = app.control.observatory
        assert observatory is not None
        (holder,) = [id_ for id_ in engines.urls if app.router.index.blocks(id_)]
        key = next(iter(app.router.index.holders[holder].owner))
        told = Template(7, 0, 2_048, key, messages=1, label=CANARY, conversations=3, path=CHAT, body=b"{}")
        observatory.register_templates([told, Template(8, 7, 4_096, key=1)])
        shown = await page(client, app, "observatory")
        by_id = {row["id"]: row for row in shown["map"]}
        root, twig = by_id[f"{7:016x}"], by_id[f"{8:016x}"]
        assert (root["holders"], twig["holders"], twig["parent"]) == ([holder], [], root["id"])
        bytes_per_token = app.router.models.tokens("sim").bytes_per_token
        assert root["prompt_tokens"] == int(2_048 / bytes_per_token)
        rows = {row["id"]: row for row in (await page(client, app, "templates"))["templates"]}
        row = rows[root["id"]]
        assert (row["conversations"], row["can_prewarm"], row["messages"], row["path"]) == (3, True, 1, CHAT)
        assert rows[twig["id"]]["can_prewarm"] is False
        assert row["label"] == f"System prompt ({row['id'][:6]})"
        assert [each.id for each in observatory.hottest(5)] == [7]


def differing(record: RequestRecord) -> None:
    """As if its system prompt had begun with the time of day."""
    assert record.cache.analysis is not None
    assert record.cache.miss is not None
    where = Difference(DifferenceKind.TIMESTAMP, 0, "system", "messages[0].content", 60, 41, 400, "00:00")
    where.before, where.after = CANARY, CANARY
    record.cache.analysis.template, record.cache.analysis.difference = 7, where
    misses = record.cache.miss.misses
    misses[MissReason.DIVERGED] = misses.pop(MissReason.NEW, 0) + misses.pop(MissReason.COLD, 0)


@pytest.mark.parametrize("excerpts", [False, True])
async def test_advice_says_what_it_costs_and_quotes_nobody(
    client: ClientSession, engines: Engines, excerpts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference is in the advice, in its template's row and in the overview, with the tokens lost; text of prompts
    is on no page unless excerpts are wanted."""
    async with running(*engines.urls, insights__excerpts=excerpts) as app:
        observatory = app.control.observatory
        assert observatory is not None
        ledger = observatory.ledger.observe

        def observe(record: RequestRecord) -> None:
            differing(record)
            ledger(record)

        monkeypatch.setattr(observatory, "observe", observe)
        observatory.register_templates([Template(7, 0, 2_048, 5, label=CANARY, path=CHAT)])
        for number in range(3):
            await chat(client, app, f"question {number} " * 50)
        advice = await page(client, app, "advice")
        (row, *_) = advice["advice"]
        totals = (await page(client, app, "observatory"))["totals"]
        lost = totals["misses"]["diverged"]
        assert advice["window_s"] == 3_600
        assert (row["rank"], row["change"], row["requests"]) == (1, "timestamp", 3)
        assert row["lost_tokens"] == pytest.approx(lost, rel=0.02)
        assert lost > 0
        assert (row["lost_tokens_per_h"], row["gpu_s_per_h"]) == (None, None), "nothing is made up from seconds"
        assert row["cost"].endswith(" s")
        assert "at byte 41" in row["text"]
        templates = await page(client, app, "templates")
        (found,) = templates["templates"][0]["differences"]
        assert (found["change"], found["shape"], found["at_bytes"]) == ("timestamp", "00:00", 41)
        overview = await page(client, app, "observatory")
        assert overview["advice"][0]["text"] == row["text"]
        for quoted in (str(advice), str(templates), str({**overview, "decisions": []})):
            assert (CANARY in quoted) is excerpts


async def test_full_pages_are_made_in_slices(client: ClientSession, engine: FakeEngine) -> None:
    """With as many templates as there may be, all are in the list, and the map has as many as can be seen, and the
    others of each as one."""
    async with running(engine) as app:
        observatory = app.control.observatory
        assert observatory is not None
        most = app.control.settings.insights.templates_max
        observatory.register_templates([Template(n, n // 2, 512 * n, n) for n in range(1, 2 * most)])
        known = len((await page(client, app, "templates"))["templates"])
        assert template_tree.MAP_MAX < known <= most
        drawn = (await page(client, app, "observatory"))["map"]
        others = [row for row in drawn if row["id"].startswith("others-")]
        assert len(drawn) - len(others) == template_tree.MAP_MAX >= len(others) > 0
        assert sum(int(row["label"].split()[0]) for row in others) == known - template_tree.MAP_MAX


async def test_a_failed_request_counts_where_it_was_placed(client: ClientSession, engine: FakeEngine) -> None:
    """Refusals of the engine are requests of their group; what was not placed is of none."""
    engine.script.append(status(400))
    async with running(engine) as app:
        for model in ("m", "nobody-has-this"):
            async with client.post(app.url + CHAT, json={"model": model, "messages": []}) as response:
                assert response.status in (400, 404)
        shown = await page(client, app, "observatory")
        assert [(group["route"], group["requests"]) for group in shown["groups"]] == [(CHAT, 1)]


async def test_without_an_observatory_there_are_no_pages(client: ClientSession, engine: FakeEngine) -> None:
    """What is off is not there; metrics have their names still."""
    async with running(engine, insights__enabled=False) as app:
        async with client.post(app.url + CHAT, json={"model": "m", "messages": []}) as response:
            assert response.status == 200
        for name in ("observatory", "templates", "advice"):
            async with client.get(f"{app.admin_url}/admin/{name}") as response:
                assert response.status == 404
        async with client.get(f"{app.admin_url}/metrics") as response:
            assert "# TYPE warmroute_group_requests_total counter" in await response.text()
