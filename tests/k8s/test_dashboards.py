"""Dashboards and rules tell the truth: a router under load and in trouble, scraped by a real Prometheus.

One run for all tests: replicas with KV events, agents' sessions, a burst beyond what the fleet takes, a tenant beyond
its rate, settings read again, a replica killed amid an answer. Then every expression is parsed by Prometheus' grammar,
held against what the router's page has, and asked of Prometheus.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.observability.dashboards import BOARDS
from deploy.observability.rules import ALERTS, recorded
from deploy.observability.scene import HOST, Scene, filled, routing, scene
from loadtest.common.stores import store
from tests.k8s.tools import in_tools, run

REPLICAS, TIME_SCALE = 3, 30.0
TARGET_LABELS = {"job", "instance", "namespace", "le"}  # of Prometheus' making, and of histograms
NOT_OURS = {"up"}

# Empty for replicas that are listed and agents that name no step, as here; to Prometheus an empty label is none.
EMPTY = {"warmroute_replica_info": {"name", "node", "pod", "namespace"}}
EMPTY |= {f"warmroute_group_{name}": {"step"} for name in ("requests_total", "prompt_tokens_total", "hit_tokens_total")}
EMPTY["warmroute_group_ttft_seconds_bucket"] = {"step"}
# Emitted only by a router with disaggregated prefill, which this run is without.
ABSENT = {"warmroute_disagg_decisions_total": {"decision", "model"}}

# All answers of the run tell what was cached, so that nothing is left for engines' counters to tell.
TOLD = re.compile("token_hit_rate_(counted|silent):|: counted$")

WALK = """
import json, sys
import promql_parser as promql

def walk(node, found):
    if isinstance(node, promql.VectorSelector):
        found["selectors"].append([node.name, [m.name for m in node.matchers.matchers]])
    modifier = getattr(node, "modifier", None)
    found["labels"] += getattr(modifier, "labels", None) or []
    found["labels"] += getattr(getattr(modifier, "matching", None), "labels", None) or []
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if getattr(node, name, None) is not None:
            walk(getattr(node, name), found)
    for argument in getattr(node, "args", None) or []:
        walk(argument, found)
    return found

print(json.dumps([walk(promql.parse(expr), {"selectors": [], "labels": []}) for expr in json.load(sys.stdin)]))
"""


def expressions() -> dict[str, str]:
    """Every expression of dashboards, rules and alerts, by where it is."""
    found = {}
    for name, board in BOARDS.items():
        for panel in (panel for row in board.rows for panel in row.panels):
            for expr, legend in panel.queries:
                found[f"{name}: {panel.title}: {legend}"] = filled(expr, 60)
        found |= {f"{name}: mark {mark.name}": filled(mark.expr, 60) for mark in board.marks}
    found |= {f"rule: {name}": expr for name, expr in recorded().items()}
    return found | {f"alert: {alert.name}": alert.expr for alert in ALERTS}


@dataclass
class Run:
    """What was seen."""

    page: str = ""  # at the end
    labels: dict[str, set[str]] = field(default_factory=dict)  # names of labels by metric, as scraped
    empty: list[str] = field(default_factory=list)  # where an expression of a dashboard had no data
    recorded: dict[str, int] = field(default_factory=dict)  # series of each recording rule
    rules: list[dict[str, Any]] = field(default_factory=list)  # as Prometheus evaluated them
    statuses: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run. Without Prometheus it is a failure where it could have been installed, else skipped."""
    if shutil.which("prometheus") is None:
        (pytest.fail if os.geteuid() == 0 else pytest.skip)("prometheus is not installed")
    return asyncio.run(_run(tmp_path_factory.mktemp("scene")))


async def _run(folder: Path) -> Run:
    begun_s = time.time()
    async with AsyncExitStack() as stack:
        it = await stack.enter_async_context(scene(folder, replicas=REPLICAS, time_scale=TIME_SCALE))
        it.shared_url = (await stack.enter_async_context(store(folder))).url  # metrics of sharing are there too
        await stack.enter_async_context(routing(it))
        load = asyncio.create_task(it.replay(400, 14))
        await asyncio.sleep(8)
        seen = Run(statuses=[*await it.burst(80, "globex"), *await it.burst(10, "thrifty")])
        await it.reload()
        await it.kill_answering()
        await load
        seen.statuses += await it.burst(20, "acme")
        await asyncio.sleep(12)  # two evaluations of the rules
        await _look(it, seen, begun_s)
    return seen


async def _look(it: Scene, seen: Run, begun_s: float) -> None:
    end_s = time.time()
    async with aiohttp.ClientSession() as client:
        async with client.get(f"http://{HOST}:{it.admin_port}/metrics") as response:
            seen.page = await response.text()
        async with client.get(f"{it.prometheus}/api/v1/rules") as response:
            groups = (await response.json())["data"]["groups"]
            seen.rules = [rule for group in groups for rule in group["rules"]]
        window = {"match[]": '{job=~"warmroute|engines"}', "start": begun_s, "end": end_s}
        async with client.get(f"{it.prometheus}/api/v1/series", params=window) as response:
            for series in (await response.json())["data"]:
                seen.labels.setdefault(series["__name__"], set()).update(series.keys() - {"__name__"})
    for where, expr in expressions().items():
        if not where.startswith(("rule: ", "alert: ")):
            answer = await it.query(expr, begun_s, end_s)
            if not any(value != "NaN" for each in answer for _, value in each["values"]):
                seen.empty.append(where)
    for name in recorded():
        seen.recorded[name] = len(await it.query(name, begun_s, end_s))


def test_the_run_had_what_it_takes(ran: Run) -> None:
    """There were requests that were answered, some that were turned away for either reason, and one that broke off."""
    assert ran.statuses.count(200) > 10
    assert ran.statuses.count(429) >= 2
    for code in ("overloaded", "rate_limited"):
        assert re.search(rf'shed_requests_total{{code="{code}",[^}}]*priority="normal"}} [1-9]', ran.page), code
    assert re.search(r'replica_failures_total{kind="broke_midway",[^}]*} [1-9]', ran.page)


def test_every_expression_returns_data(ran: Run) -> None:
    """Every panel of every dashboard has something to show."""
    print(f"{len(expressions())} expressions, {len(ran.empty)} without data: {ran.empty}")
    assert [where for where in ran.empty if not TOLD.search(where)] == []


def test_expressions_name_only_what_a_router_emits(ran: Run) -> None:
    """Parsed by Prometheus' grammar, every metric was scraped from the router with the labels that are asked of it."""
    emitted = ABSENT | {name: labels | EMPTY.get(name, set()) for name, labels in ran.labels.items()}
    parsed = in_tools(WALK, text=json.dumps(list(expressions().values())))
    for (where, expr), found in zip(expressions().items(), parsed, strict=True):
        known = TARGET_LABELS | set(re.findall(r'label_replace\(.*?, "(\w+)", "', expr))
        for name, labels in found["selectors"]:
            assert name in emitted or name in NOT_OURS or name in recorded(), (where, name)
            known |= emitted.get(name, {"cause"})
            assert set(labels) <= emitted.get(name, set()) | TARGET_LABELS, (where, name, labels)
        assert set(found["labels"]) <= known, (where, found["labels"])
    print(f"{len(parsed)} expressions name {len({n for f in parsed for n, _ in f['selectors']})} metrics")


def test_prometheus_evaluates_every_rule(ran: Run) -> None:
    """No rule fails, every recording rule has recorded, and no alert that has to do with something else fires."""
    assert {rule["name"] for rule in ran.rules} == {*recorded(), *(alert.name for alert in ALERTS)}
    assert [(rule["name"], rule.get("lastError")) for rule in ran.rules if rule["health"] != "ok"] == []
    assert [name for name, count in ran.recorded.items() if not count and not TOLD.search(name)] == []


def test_the_page_is_clean(ran: Run) -> None:
    """`promtool check metrics` has nothing to say of the router's page."""
    done = run(["promtool", "check", "metrics"], ran.page)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_spill_has_a_cause(ran: Run) -> None:
    """The run made requests go off their longest holder, and each says why."""
    spills = dict(re.findall(r'^warmroute_spills_total{cause="(\w+)",[^}]*} (\S+)', ran.page, re.MULTILINE))
    print(spills)
    assert sum(map(float, spills.values())) > 0
