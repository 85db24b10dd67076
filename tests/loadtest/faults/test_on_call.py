"""First signs of troubles: read from a router, judged, printed, and rendered."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from loadtest.common.rivals import OURS
from loadtest.fake_engine.command import Engines, EngineSettings
from loadtest.faults import command as faults
from loadtest.faults.on_call import alerts, report, staged_cluster, watch
from loadtest.faults.on_call.signs import Page, Rows, open_page, read_top
from loadtest.faults.on_call.staged_cluster import Cluster, Hop, run_cluster
from loadtest.faults.on_call.troubles import TROUBLES, Trouble
from loadtest.faults.on_call.watch import Found, Look, Seen
from tests.loadtest.rendering import Page as Rendered
from tests.support.observatory_page import observatory
from tests.support.waiting import until

HANG = next(each for each in TROUBLES if each.name.startswith("a replica hangs"))
FLOOD = next(each for each in TROUBLES if each.name.startswith("one tenant"))
NOW_S = 1_800_000_000.0
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="the dashboard's modules need node")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="rules are evaluated by promtool")


def some_cluster() -> Cluster:
    """A cluster that does not run."""
    hops = [Hop(f"http://127.0.0.1:{port}", url=f"http://127.0.0.1:{port + 100}") for port in (5001, 5002)]
    return Cluster(Engines(EngineSettings(replicas=2)), hops, None, [1, 2], Path(), 1)


def alert(at_s: float, name: str, **labels: str) -> alerts.Alert:
    """An alert with a condition that holds."""
    return alerts.Alert(at_s, name, "pending", labels, "10m")


def judged(trouble: Trouble, looks: list[Look], fired: list[alerts.Alert] | None) -> Seen:
    """What is found in these looks; the trouble begins at 100 s."""
    seen = Seen(trouble.name)
    watch.judge(seen, trouble, some_cluster(), looks, fired, 100.0)
    return seen


def test_a_sign_names_the_cause_only_with_its_subject() -> None:
    """A row with words of the cause and another replica is a first sign; the row that names the replica ends the
    search. What was shown before the trouble is a false sign, and no sign of it."""
    old, other = "Hit rate is 7 %, usually 92 %", "1 of 2 receive no requests: 127.0.0.1:9 (no answer for 4 s)"
    row = "1 of 2 receive no requests: 127.0.0.1:5101 (no answer for 4 s)"
    looks = [
        Look(90.0, Rows([old], [old]), Rows()),
        Look(102.5, Rows([old], [old]), Rows()),
        Look(105.0, Rows([other], [other]), Rows([row], [])),
        Look(110.0, Rows([row], [row]), Rows([row], [])),
    ]
    seen = judged(HANG, looks, [alert(130.0, "WarmrouteBreakerOpen", replica="http://127.0.0.1:5101")])
    assert seen.surfaces["page"] == Found(10.0, row, 5.0)
    assert seen.surfaces["top"] == Found(5.0, row, 5.0)
    assert seen.surfaces["alert"].named_s == 30.0
    assert seen.false == {"page": [old], "top": [], "alert": []}


def test_an_alert_needs_a_label_with_the_subject() -> None:
    """An alert of another tenant, and one with another cause, name nothing."""
    others = [alert(115.0, "WarmrouteTenantDominates", tenant="shop"), alert(115.0, "WarmrouteQueue", model="batch")]
    found = judged(FLOOD, [], others).surfaces["alert"]
    assert (found.named_s, found.first_s) == (None, 15.0)
    assert judged(FLOOD, [], [alert(145.0, "WarmrouteTenantDominates", tenant="batch")]).surfaces["alert"].named_s == 45


def test_what_was_not_read_has_no_verdict() -> None:
    """Without promtool and node, alerts and the page are `not evaluated`, and neither met nor missed."""
    seen = judged(HANG, [Look(105.0, None, Rows())], None)
    rows = {row.workload: row for row in report.trouble_rows(HANG, seen)}
    assert (rows["page"].ok, rows["alert"].ok, rows["top"].ok) == (None, None, False)
    (line,) = report.table_lines(list(rows.values()))
    assert line == (HANG.name, "-", "not evaluated", "-", "not evaluated", "missing: top; not evaluated: page, alert")


def test_the_words_of_a_cause_are_not_those_of_a_healthy_fleet() -> None:
    """No trouble is found in the rows of a router without one."""
    rows = [
        "No problems for 10 min: replicas are ready, and hit rate and times are steady.",
        "warmroute 0.1.0   up 12 min   512 requests   errors 0 of the last 20",
        "127.0.0.1:5101   1.2   20.0 %   60 ms   90 ms   2/256   0   3 ms   12.0 %   0   exact   ready",
        "TTFT p50 60 ms  p90 90 ms  p99 200 ms   diversity 0.90   5 of 5 take requests",
    ]
    for trouble in TROUBLES:
        assert not any(trouble.is_named(some_cluster(), row) for row in rows), trouble.name


def scraped(at_s: float, is_open: float, requests: float) -> alerts.Scrape:
    """Metrics of one replica."""
    replica = (("replica", "http://127.0.0.1:5101"),)
    breaker: alerts.Key = ("warmroute_replica_breaker", (*replica, ("state", "open")))
    count: alerts.Key = ("warmroute_requests_total", (("model", "m"), ("status", "200")))
    values = {breaker: is_open, count: requests, (alerts.STARTED, ()): 1.0, ("warmroute_build_info", ()): 1.0}
    return alerts.Scrape(at_s, values | {("warmroute_replica_ready", replica): 1.0}, frozenset({count}))


@needs_promtool
async def test_the_charts_rules_are_evaluated_over_what_was_scraped(tmp_path: Path) -> None:
    """An open breaker makes its alert pending at the first scrape that has it, with the replica; nothing else is shown,
    before or after."""
    some = [scraped(15.0 * n, float(n >= 6), 100.0 + 30.0 * n) for n in range(9)]
    found = await alerts.evaluate(shutil.which("promtool") or "", some, 6, tmp_path)
    assert [(each.at_s, each.name, each.state) for each in found] == [
        (at_s, "WarmrouteBreakerOpen", "pending") for at_s in (90.0, 105.0, 120.0)
    ]
    assert found[0].labels["replica"] == "http://127.0.0.1:5101"
    assert found[0].fires_after == "5m"


def test_counters_continue_their_history_until_a_restart() -> None:
    """The history grows at the rate of the quiet time and ends where the scraped values begin; a router that started
    later begins anew."""
    some = [scraped(15.0 * n, 0.0, 100.0 + 30.0 * n) for n in range(3)]
    count: alerts.Key = ("warmroute_requests_total", (("model", "m"), ("status", "200")))
    restarted = alerts.Scrape(45.0, {count: 5.0, (alerts.STARTED, ()): 99.0}, frozenset({count}))
    series = dict(alerts._series([*some, restarted], 3, 400))
    values = next(text for name, text in series.items() if name.startswith("warmroute_requests_total"))
    assert values == "0+30x399 12000 12030 12060 5"


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """The URL of a server that answers every request so."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def troubled(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Page, aiohttp.ClientSession]]:
    """A small cluster with a page."""
    async with (
        run_cluster(tmp_path, has_small=False, seed=1) as (running, session),
        open_page(running.admin_url, tmp_path) as page,
    ):
        assert page is not None
        yield running, page, session


@needs_node
async def test_a_hung_replica_is_named_on_the_page_and_in_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents work without a failure; then the busiest replica hangs, and both surfaces come to name it."""
    monkeypatch.setattr(staged_cluster, "AGENTS", 8)
    async with troubled(tmp_path) as (running, page, session):
        await until(lambda: running.requests >= 30)
        assert running.failures == 0
        running.choose_busiest()
        await HANG.begin(running, session)
        named = dict.fromkeys(("page", "top"), False)
        while not all(named.values()):  # a minute for each test
            for surface, rows in (("page", await page.read()), ("top", await read_top(session, running.admin_url))):
                named[surface] |= any(HANG.is_named(running, row) for row in rows.all)


@needs_node
async def test_a_start_is_named_and_a_spill_is_no_warning(tmp_path: Path) -> None:
    """A router that started two minutes ago says so though nothing else needs attention. Tokens that were spilled to
    save waiting are advice, and other advice is a warning."""
    shown = observatory(NOW_S) | {"uptime_s": 120.0, "pages": [], "timeline": {"step_s": 5, "points": []}}
    shown["replicas"] = [row for row in shown["replicas"] if row["ready"]]
    spilled = next(row for row in shown["advice"]) | {"change": "spilled", "requests": 100, "lost_tokens": 10_000}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(shown)

    async with serving(answer) as url, open_page(url, tmp_path) as page:
        assert page is not None
        shown["advice"] = [spilled]
        quiet = await page.read()
        assert quiet.signs == []
        assert quiet.all[0].startswith("No problems since this router started 2 min ago")
        shown["advice"] = [spilled | {"change": "timestamp", "last_at_s": NOW_S}]
        assert len((await page.read()).signs) == 2  # and that the router has just started


def test_the_command_reports_each_surface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quiet time and one trouble in seconds: rows of three surfaces each, in the table and the JSON. What is missed
    matters with --check only."""
    monkeypatch.setattr(watch, "WARM_S", 0.0)
    file = tmp_path / "rows.json"
    words = ["--on-call", "--troubles", "9", "--quiet-s", "1", "--sign-s", "1", "--json", str(file)]
    assert faults.main(words) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["workload"] for row in rows] == [*watch.SURFACES, *watch.SURFACES]
    assert rows[4]["ok"] is False  # `top` has no sign within a second
    shown = capsys.readouterr().out
    assert "missing: " in shown
    assert "every fifth batch" in shown


def test_the_table_is_rendered(tmp_path: Path) -> None:
    """The page has a line for each trouble, without ports; a part of a run is refused."""
    seen = Seen("", false={surface: [] for surface in watch.SURFACES})
    rows = report.quiet_rows(seen, 600.0)
    for trouble in TROUBLES:
        found = {surface: Found(7.0, "127.0.0.1:5101 is slow", 5.0) for surface in watch.SURFACES}
        rows += report.trouble_rows(trouble, Seen(trouble.name, surfaces=found))
    page = Rendered(tmp_path, "on-call")
    text = page.render("faults --on-call --json x.json", rows, {OURS: "1.0"})
    assert "| quiet for 600 s | - | - | - | - | ok |" in text
    assert text.count("| 5 | 7 s: REPLICA is slow |") == len(TROUBLES)
    page.refuse("faults --on-call --json x.json", rows[:-3])


def test_main_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --check a cause that is not named ends the command with 1."""

    async def missed(*_: Any) -> list[Any]:
        return report.trouble_rows(HANG, judged(HANG, [], None))

    monkeypatch.setattr(faults, "on_call", missed)
    assert faults.main(["--on-call"]) == 0
    assert faults.main(["--on-call", "--check"]) == 1
