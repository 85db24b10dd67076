"""The pages of the past over HTTP: parameters, bounds, and a request's page for whoever sent it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.admin.history import request_history as kept
from router.router_server import RouterServer
from tests.admin.history.records import until
from tests.support.fakes import FakeEngine, breaks_midway, reset, running, status
from tests.support.keyring import ADMIN, Keyring, bearer

CHAT, OWN = "/v1/chat/completions", "/v1/warmroute/requests/"


async def ask(
    client: ClientSession, app: RouterServer, id_: str, headers: dict[str, str] | None = None, **more: Any
) -> None:
    """One request of this id."""
    body = {"model": "m", "messages": [{"role": "user", "content": "tell me more " * 300}], **more}
    async with client.post(app.url + CHAT, json=body, headers={"x-request-id": id_} | (headers or {})) as answer:
        await answer.read()


async def page(client: ClientSession, url: str, code: int = 200, headers: dict[str, str] | None = None) -> Any:
    """A page's JSON."""
    async with client.get(url, headers=headers) as answer:
        assert answer.status == code, await answer.text()
        return await answer.json()


async def test_decisions_are_found(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """By id, session, model, status, replica and reason; the newest first, twenty unless told otherwise, page by page;
    and again after a restart."""
    options = {"admin__history_path": str(tmp_path / "history.db")}
    async with running(engine, **options) as app:
        for n in range(25):
            await ask(client, app, f"r{n}", {"x-session-id": f"s{n % 3}"})
        engine.script.append(status(400))
        await ask(client, app, "bad")
        await ask(client, app, "cached", prompt_cache_key="key")
    async with running(engine, **options) as app:
        url = app.admin_url + "/admin/decisions"
        for query, expected in (
            ("id=r3", ["r3"]), ("id=chatcmpl-r3", ["r3"]), ("id=no", []), ("status=400", ["bad"]),
            ("session=s1&limit=3", ["r22", "r19", "r16"]), ("session=key", ["cached"]), ("status=4xx&model=m", ["bad"]),
            ("model=other", []), (f"replica={engine.url}&limit=2", ["cached", "bad"]), ("reason=spill", []),
            ("reason=tail&session=s0&limit=1", ["r24"]), ("session=&limit=1", ["cached"]), ("from_s=9e10", []),
        ):  # fmt: skip
            found = await page(client, f"{url}?{query}")
            assert [row["id"] for row in found["decisions"]] == expected, query
        first = await page(client, url)
        rest = await page(client, f"{url}?before={first['next_before']}")
        assert [len(each["decisions"]) for each in (first, rest)] == [20, 7]
        assert [each["more"] for each in (first, rest)] == [True, False]
        assert rest["next_before"] is None
        (row,) = (await page(client, f"{url}?id=r3"))["decisions"]
        again = await page(client, f"{url}?session={row['session']}&limit=500")
        assert len(again["decisions"]) == 9
        assert first["kept"]["state"] == "ok"
        assert first["kept"]["decisions_since_s"] <= row["at_s"]


async def test_an_answer_is_bounded(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are asked for, an answer ends before its limit of bytes and says where to go on: from memory,
    and from the file. Every decision is on exactly one page."""
    monkeypatch.setattr(kept, "BYTES_MAX", 6_000)
    async with running(engine, admin__history_path=str(tmp_path / "h"), limits__recent_decisions_max=10) as app:
        for n in range(30):
            await ask(client, app, f"r{n}")
        seen, before, pages = list[str](), "", 0
        while before != "None":
            async with client.get(f"{app.admin_url}/admin/decisions?limit=500&before={before}") as answer:
                body = await answer.read()
            assert len(body) < 7_500
            found = json.loads(body)
            seen += [row["id"] for row in found["decisions"]]
            before, pages = str(found["next_before"]), pages + 1
    assert seen == [f"r{n}" for n in reversed(range(30))]
    assert pages > 5


async def test_wrong_parameters_are_told(client: ClientSession, engine: FakeEngine) -> None:
    """An unknown parameter, one given twice and a value that makes no sense are 400 on every admin page, with the right
    ones; pages that take none refuse all."""
    async with running(engine) as app:
        for path, words in (
            ("decisions?sesion=x", "Unknown parameter 'sesion'; the nearest is 'session'."),
            ("decisions?limit=0", "'limit' must be an integer from 1 to 500, not '0'."),
            ("decisions?limit=501", "from 1 to 500"), ("decisions?limit=1&limit=2", "'limit' is duplicated"),
            ("decisions?limit=x", "takes id, session, model, reason, tenant, replica, status, from_s, to_s, before"),
            ("decisions?status=700", "'status' must be a status such as 503"),
            ("decisions?reason=why", "'reason' must be one of warm"),
            ("decisions?id=" + "x" * 600, "longer than 512"),
            ("replicas?limit=1", "/admin/replicas has no parameters."),
            ("observatory?x=1", "has no parameters"), ("index?x", "has no parameters"),
            ("series?from_s=2&to_s=1", "must be before"), ("series?step_s=7", "multiple of 5"),
            ("series?step_s=90&from_s=0&to_s=900", "multiple of 60"),
            ("series?from_s=1790000000&to_s=1795600000&step_s=3600", "use steps of 21600 s"),
            ("prewarm?wait=true", "has no parameters"), ("advice?limit=1", "no parameters"),
            ("templates?x=", "no parameters"),
        ):  # fmt: skip
            error = (await page(client, f"{app.admin_url}/admin/{path}", 400))["error"]
            assert error["code"] == "bad_parameter"
            assert words in error["message"], error
        async with client.get(f"{app.admin_url}/dashboard?x=1") as answer:
            assert answer.status == 200


async def test_figures_over_time(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Every request is counted in exactly one point by what became of it, with tokens and times; and still after a
    restart. Points are even, and a time before there was a router is not known."""
    options = {"admin__history_path": str(tmp_path / "history.db")}
    totals: list[dict[str, int]] = []
    for n in range(2):
        async with running(engine, **options) as app:
            if n == 0:
                for each in (None, breaks_midway, status(400), status(429)):
                    engine.script.extend([each] if each is not None else [])
                    await ask(client, app, "x", stream=True, stream_options={"include_usage": True})
                app.control.history.tick()
            else:
                await until(lambda: app.control.history.status().intervals_since_s)  # type: ignore[union-attr]
            series = await page(client, app.admin_url + "/admin/series")
            long = await page(client, f"{app.admin_url}/admin/series?from_s={series['now_s'] - 86_400 * 10}")
        points = series["points"]
        assert [point["at_s"] for point in points] == list(range(series["from_s"], series["to_s"], 5))
        assert len(points) in (120, 121)
        assert not points[0]["known"]
        assert (len(long["points"]) <= 720, long["step_s"]) == (True, 1_800)
        known = [point for point in points if point["known"]]
        counts = (
            "requests",
            "placed",
            "broken",
            "errors_4xx",
            "completion_tokens",
            "verified_hit_tokens",
            "hit_tokens",
        )
        totals.append({name: sum(point[name] for point in known) for name in counts})
        assert sum(point["requests"] for point in long["points"] if point["known"]) == totals[0]["requests"]
    assert totals[0] == totals[1]
    assert totals[0]["requests"] == totals[0]["placed"] == 4
    assert totals[0]["broken"] == 1
    assert totals[0]["completion_tokens"] == 3
    assert totals[0]["verified_hit_tokens"] == 32


# -- for whoever sent it -------------------------------------------------------------------------------------------

BASIC = {
    "id", "at_s", "route", "model", "stream", "status", "ending", "error", "detail", "ttft_s", "wanted_ttft_s",
    "in_time", "inter_token_s", "duration_s", "events", "usage",
}  # fmt: skip
TOLD = {
    "replica", "reason", "grade", "prompt_tokens", "predicted_cached_tokens", "waited_s", "retries", "spill",
    "spilled_tokens", "hit_tokens", "miss", "turn", "difference",
}  # fmt: skip


@pytest.mark.promise("The outcome of a request is shown to its tenant only.", "tenants")
async def test_a_tenant_sees_its_own_requests_and_no_others(
    client: ClientSession, engine: FakeEngine, tmp_path: Path
) -> None:
    """Under its key a tenant finds what became of its request, with final counts where its answers carry receipts, and
    only what it knows anyway where they do not. Another tenant's request, one that is not there, and one whose id
    another tenant has used as well look alike but for its own. After a restart too."""
    ring = Keyring(tmp_path, told={}, untold={}, third={})
    entries = ring.file.read_text().replace('tenant: "told"', 'tenant: "told"\n  receipts: true')
    ring.file.write_text(entries)
    options = {**ring.settings, "admin__token": ADMIN, "admin__history_path": str(tmp_path / "h")}
    for again in range(2):
        async with running(engine, **options) as app:
            if not again:
                for tenant in ("told", "untold"):
                    await ask(client, app, f"of-{tenant}", ring.of(tenant))
                    await ask(client, app, "same", ring.of(tenant))
            nothing = await page(client, app.url + OWN + "nothing", 404, ring.of("told"))
            assert nothing["error"]["code"] == "unknown_request"
            for tenant, others in (("told", ("untold", "third")), ("untold", ("told", "third"))):
                row = await page(client, f"{app.url}{OWN}of-{tenant}", headers=ring.of(tenant))
                assert row.keys() == (BASIC | TOLD if tenant == "told" else BASIC)
                assert row["usage"]["cached_tokens"] == 32
                assert (await page(client, app.url + OWN + "same", headers=ring.of(tenant)))["id"] == "same"
                for other in others:
                    assert await page(client, f"{app.url}{OWN}of-{tenant}", 404, ring.of(other)) == nothing
            assert await page(client, app.url + OWN + "same", 404, ring.of("third")) == nothing
            for id_ in ("a/b", "%00", "x" * 129, "of-told?tenant=told"):
                assert (await page(client, app.url + OWN + id_, 404, ring.of("third"))) == nothing, id_
            for headers in ({}, bearer(ADMIN), bearer("wr-none-none-none-none")):
                await page(client, app.url + OWN + "of-told", 401, headers)
        assert engine.url not in json.dumps(row)


async def test_without_keys_receipts_decide(client: ClientSession, engine: FakeEngine) -> None:
    """Where nobody is told apart, the page of a request says what its answer's headers did."""
    for receipts in (True, False):
        async with running(engine, api__receipts=receipts) as app:
            await ask(client, app, "mine")
            row = await page(client, app.url + OWN + "mine")
            assert row.keys() == (BASIC | TOLD if receipts else BASIC)
            assert await page(client, app.url + OWN + "yours", 404)


async def test_a_cause_is_for_who_may_see_receipts(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Why a request failed behind the router, which names replicas, is on the page of whoever may see receipts, and on
    nobody else's."""
    ring = Keyring(tmp_path, told={}, untold={})
    ring.file.write_text(ring.file.read_text().replace('tenant: "told"', 'tenant: "told"\n  receipts: true'))
    async with running(engine, **ring.settings, admin__token=ADMIN, upstream__retries_max=0) as app:
        for tenant in ("told", "untold"):
            engine.script.append(reset)
            await ask(client, app, f"of-{tenant}", ring.of(tenant))
            row = await page(client, f"{app.url}{OWN}of-{tenant}", headers=ring.of(tenant))
            assert row["status"] == 502
            assert row["detail"].startswith("The replica failed")
            assert (engine.url in json.dumps(row)) is (tenant == "told")
