"""Sums by model and by group over any range of time, in memory, in the file, and on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from router.admin.history.breakdowns import GROUPS_MAX, MODELS_MAX, Breakdown, Counts, RangeRows, count_now
from router.admin.history.request_history import RouterHistory
from router.core.insights.ledger.groups import OTHER, REST, Group, Label
from router.router_server import RouterServer
from tests.admin.history.records import Clock, until
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import ADMIN, Keyring, bearer

CHAT = "/v1/chat/completions"
ZEROS = {"failed": 0, "shed": 0, "prompt_tokens": 0, "completion_tokens": 0, "hit_tokens": 0, "verified_tokens": 0}


def counts_of(requests: dict[str, int]) -> Counts:
    """As if so many requests of each model had ended since the router began."""
    return count_now([{"model": model, "requests": n, **ZEROS} for model, n in requests.items()], {})


async def requests_in(history: RouterHistory, from_s: int, to_s: int) -> dict[str, int]:
    """Requests of each model over that time."""
    rows = RangeRows()
    for sums in (await history.downsample(from_s, to_s, 60)).values():
        rows.add(sums)
    return {row["model"]: row["requests"] for row in rows.models()}


async def test_a_range_has_the_requests_of_its_minutes() -> None:
    """Each minute has what was added in it. What no minute has yet is apart, and is counted once."""
    clock, requests = Clock(), dict[str, int]()
    begun_s = int(clock.now_s) // 60 * 60
    history = RouterHistory(decisions_max=1, keeper=None, load=lambda: (0, 0), wall_clock=clock)
    history.break_down(lambda: counts_of(requests))
    for minute, model in enumerate(("old", "both", "new")):
        requests[model] = requests.get(model, 0) + 10
        requests["both"] = requests.get("both", 0) + 1
        while clock.now_s < begun_s + 60 * (minute + 1):
            clock.now_s += 5
            history.tick()
    requests["late"] = 3
    assert await requests_in(history, begun_s, begun_s + 180) == {"both": 13, "old": 10, "new": 10}
    assert await requests_in(history, begun_s + 60, begun_s + 120) == {"both": 11}
    assert await requests_in(history, begun_s + 120, begun_s + 180) == {"new": 10, "both": 1}
    for _ in range(2):
        rows = RangeRows()
        rows.add(history.current_breakdown())
        assert [(row["model"], row["requests"]) for row in rows.models()] == [("late", 3)]


def test_parts_of_a_minute_are_bounded() -> None:
    """The rest of the models and groups is one more row, and nothing is lost; names may contain anything."""
    groups: dict[Label, Group] = {}
    for number in range(3 * GROUPS_MAX):
        group = groups[Label(CHAT, "acme", True, f'step:"{number}"_max', "claude-code")] = Group()
        group.now[0] = number + 1
        group.settle(1.0)
    models = [{"model": f"org/m:{n}_max", "requests": n + 1, **ZEROS} for n in range(3 * MODELS_MAX)]
    sums = Breakdown(lambda: count_now(models, groups)).take()
    rows = RangeRows()
    rows.add(sums)
    rows.add(sums)
    found = rows.models()
    assert len(found) == MODELS_MAX + 1
    assert sum(row["requests"] for row in found) == 2 * sum(range(3 * MODELS_MAX + 1))
    assert found[0]["model"] == OTHER
    shown = rows.groups()
    assert len(shown) == GROUPS_MAX + 1
    assert sum(row["requests"] for row in shown) == 2 * sum(range(3 * GROUPS_MAX + 1))
    assert {row["step"] for row in shown} >= {REST.step, f'step:"{3 * GROUPS_MAX - 1}"_max'}
    assert all(row["tools"] is True for row in shown if row["step"] != REST.step)


async def series(client: ClientSession, app: RouterServer, query: str = "") -> Any:
    """The page."""
    async with client.get(f"{app.admin_url}/admin/series{query}", headers=bearer(ADMIN)) as response:
        assert response.status == 200
        return await response.json()


async def test_models_and_groups_follow_the_range(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, tmp_path: Path
) -> None:
    """The page has what each model and tenant asked for within its span: at once, and after a restart from the file,
    and nothing for a span before."""
    other.models = ("big",)
    ring = Keyring(tmp_path, acme={}, bank={})
    options: dict[str, Any] = {"admin__token": ADMIN, "admin__history_path": str(tmp_path / "h.db"), **ring.settings}
    seen = []
    for run in range(2):
        async with running(engine, other, **options) as app:
            if run == 0:
                for tenant, model in (("acme", "m"), ("acme", "m"), ("bank", "big")):
                    body = {"model": model, "messages": [{"role": "user", "content": "x " * 50}]}
                    async with client.post(app.url + CHAT, json=body, headers=ring.of(tenant)) as response:
                        assert response.status == 200
            else:
                await until(lambda: app.control.history.status().intervals_since_s)  # type: ignore[union-attr]
            page = await series(client, app)
            seen.append((page["models"], page["groups"]))
            past = await series(client, app, f"?from_s={page['from_s'] - 7_200}&to_s={page['from_s'] - 3_600}")
            assert (past["models"], past["groups"]) == ([], [])
    assert seen[0] == seen[1]
    models, groups = seen[0]
    assert [(row["model"], row["requests"]) for row in models] == [("m", 2), ("big", 1)]
    assert {(row["route"], row["tenant"], row["requests"]) for row in groups} == {(CHAT, "acme", 2), (CHAT, "bank", 1)}
    assert all(row["prompt_tokens"] > 0 for row in (*models, *groups))
