"""Where prompt tokens end, through a whole router: what pages, metrics and audits tell is what engines counted.

The replicas are those of `python -m loadtest engine`: they evict by themselves, and count as vLLM does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from router.cli.main import main
from router.core.insights.token_funnel import token_fates
from router.core.types.cache_misses import FUNNEL_STAGES, TokenFate
from router.core.types.placements import Confidence
from router.proxy import http_proxy
from router.router_server import RouterServer
from router.telemetry import counters
from tests.engines.test_exact import BLOCK, CHAT, graded, replicas, routing
from tests.support.fakes import FakeEngine, running, status

LONG = [f"{word} and so on. " * 200 for word in ("Tides", "Rivers", "Clouds", "Storms", "Frosts")]
FOUND = ("tier", "replay", "gpu_hit")


async def sums(client: ClientSession, url: str, name: str, label: str = "") -> Counter[str]:
    """A counter's values on a page of metrics, by a label."""
    async with client.get(f"{url}/metrics") as response:
        text = await response.text()
    found = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels.get(label, "")] += int(sample.value)
    return found


async def engines_counted(client: ClientSession, urls: Sequence[str]) -> tuple[int, int]:
    """Prompt tokens of all replicas, and those that they found cached, by their own counters."""
    names = ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total")
    prompt, hits = [sum([(await sums(client, url, name)).total() for url in urls]) for name in names]
    return prompt, hits


async def page(client: ClientSession, app: RouterServer, path: str) -> Any:
    """A page of the admin listener."""
    async with client.get(app.admin_url + path) as response:
        assert response.status == 200
        return await response.json()


def body(*texts: str, model: str = "sim") -> dict[str, Any]:
    """A conversation that ends with a user's words."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": model, "max_tokens": 2, "messages": messages}


async def ask(client: ClientSession, app: RouterServer, asked: dict[str, Any]) -> dict[str, Any]:
    """Send it; the answer's usage."""
    async with client.post(app.url + CHAT, json=asked) as response:
        assert response.status == 200, await response.text()
        usage: dict[str, Any] = (await response.json())["usage"]
        return usage


def traffic() -> list[dict[str, Any]]:
    """Conversations in turn that do not fit together, one prompt three times in a row, and short ones."""
    turns = [[text] for text in LONG] * 2
    turns += [[text, "Yes.", f"{text} again"] for text in LONG[:2]] + [[LONG[2]]] * 3 + [["hello"]] * 3
    return [body(*texts) for texts in turns]


@pytest.mark.parametrize("policy", ["warm", "round_robin"])
@pytest.mark.parametrize("events", [True, False])
async def test_it_adds_up_to_what_engines_count(client: ClientSession, policy: str, events: bool) -> None:
    """Of every request places are its prompt as the engine counted it, and hits are what that found; in sum both are
    the engines' own counters, the hits within a block for each request. Metrics, series and decisions tell the same,
    and of what is held elsewhere who has it, and why not there."""
    options = {"routing__policy": policy}
    async with replicas(2, kv_tokens=2_048, events=events) as engines, routing(*engines.urls, **options) as app:
        before = await engines_counted(client, engines.urls)
        for asked in traffic():
            usage = await ask(client, app, asked)
            (row, *_) = (await page(client, app, "/admin/decisions"))["decisions"]
            assert sum(row["places"].values()) == usage["prompt_tokens"]
            found = sum(row["places"].get(place, 0) for place in FOUND)
            assert found == usage["prompt_tokens_details"]["cached_tokens"]
            if row["places"].get("cached_on_other_replica"):
                assert row["held_by"] in set(engines.urls) - {row["replica"]}
                assert row["spill"]
        after = await engines_counted(client, engines.urls)
        prompt, hits = (after[n] - before[n] for n in range(2))
        metric = await sums(client, app.admin_url, "warmroute_token_fate_total", "fate")
        points = (await page(client, app, "/admin/series"))["points"]
        rows = (await page(client, app, "/admin/decisions?limit=500"))["decisions"]
        stages = (await page(client, app, "/admin/observatory"))["stages"]
    assert set(metric) == set(TokenFate)
    assert metric.total() == prompt
    assert abs(sum(metric[place] for place in FOUND) - hits) <= BLOCK * len(traffic())
    assert metric["replay"] + metric["gpu_hit"] > 0
    assert metric["evicted_here"] + metric["evicted_by_others"] > 500
    told = Counter[str]()
    for row in rows:
        told.update(row["places"])
    assert told == +metric
    series, held = Counter[str](), Counter[str]()
    for point in points:
        series.update(point.get("places", {}))
        held.update(point.get("held", {}))
    assert series == +metric
    assert held.total() == metric["cached_on_other_replica"]
    assert stages == {stage: list(places) for stage, places in FUNNEL_STAGES.items()}


async def test_audit_of_prompts_tells_what_a_router_with_room_told(client: ClientSession, tmp_path: Path) -> None:
    """One replica that forgets nothing is what the audit assumes: of the same requests it tells the same places, within
    a block of the engine's for each request."""
    log, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    asked = [body(LONG[0]), body(LONG[0], "Yes.", LONG[1]), body(LONG[2]), body(LONG[2]), body("hello")]
    async with replicas(1, kv_tokens=65_536) as engines, routing(*engines.urls) as app:
        await graded(app, Confidence.EXACT)
        with log.open("w") as file:
            for each in asked:
                usage = await ask(client, app, each)
                file.write(json.dumps({"path": CHAT, "body": each, "usage": usage}) + "\n")
        live = await sums(client, app.admin_url, "warmroute_token_fate_total", "fate")
    assert main(["audit", str(log), "--json", str(out)]) == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["case"] == "place"]
    offline = Counter({row["place"]: row["tokens"] for row in rows})
    assert offline.total() == live.total()
    assert {place for place, tokens in live.items() if tokens} == set(offline)
    for place in TokenFate:
        assert abs(offline[place] - live[place]) <= BLOCK * len(asked), (place, offline, live)
    assert offline["gpu_hit"] > 700
    assert offline["replay"] > 700


async def test_what_was_not_computed_has_no_place(client: ClientSession, engine: FakeEngine) -> None:
    """A prompt that an engine refuses or fails on adds nothing; the places of a model are there from its first request
    on, at nought."""
    async with running(engine, upstream__retries_max=0) as app:
        for code in (400, 500):
            engine.script.append(status(code))
            async with client.post(app.url + CHAT, json=body("hello", model="m")) as response:
                assert response.status in (code, 502)
        metric = await sums(client, app.admin_url, "warmroute_token_fate_total", "fate")
        rows = (await page(client, app, "/admin/decisions"))["decisions"]
    assert metric == dict.fromkeys(TokenFate, 0)
    assert [row["places"] for row in rows] == [None, None]


async def test_places_without_an_observatory(client: ClientSession, engine: FakeEngine) -> None:
    """Nobody explains misses: hits by the engine's count have their place, and all else is what nobody read."""
    async with running(engine, insights__enabled=False) as app:
        await ask(client, app, body(LONG[0], model="m"))
        metric = await sums(client, app.admin_url, "warmroute_token_fate_total", "fate")
    assert +metric == {"gpu_hit": 32, "unsupported": 68}


@pytest.mark.inside
async def test_places_are_made_once(client: ClientSession, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, series, decisions and the log line of a request have one table, which is made when the answer ends."""
    made = list[int]()

    def counted(*args: Any, **more: Any) -> Any:
        made.append(1)
        return token_fates(*args, **more)

    for module in (http_proxy, counters):
        monkeypatch.setattr(module, "token_fates", counted)
    async with running(engine) as app:
        for _ in range(3):
            await ask(client, app, body(LONG[0], model="m"))
        await page(client, app, "/admin/decisions")
        await page(client, app, "/admin/series")
    assert len(made) == 3
