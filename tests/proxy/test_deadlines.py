"""Deadlines of first tokens over HTTP: who may say them, what becomes of them, and who is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.proxy.test_keys import spied
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring, bearer

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "tell me more " * 300}]}
OURS, LLM_D, OLD = "x-warmroute-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"


@pytest.mark.parametrize("value", ["soon", "", "0", "-5", "nan", "inf", "3600001", "1" * 30])
@pytest.mark.parametrize("name", [OURS, LLM_D, OLD])
async def test_what_is_no_number_is_refused(client: ClientSession, engine: FakeEngine, name: str, value: str) -> None:
    """400 with the header's name and its limits, and no engine hears of it."""
    async with (
        running(engine) as app,
        client.post(app.url + CHAT, json=BODY, headers={name: value}) as answer,
    ):
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (400, "bad_ttft")
        assert name in error["message"]
        assert "3600000" in error["message"]
    assert not engine.seen


@pytest.mark.inside  # looks into what is placed
async def test_what_the_client_says_goes_before_what_its_key_says(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, then llm-d's present name, its old one, and the key's `ttft_ms`; engines do not see ours."""
    ring = Keyring(tmp_path, acme={"ttft_ms": 4_000}, calm={})
    said = {OURS: "1000", LLM_D: "2000.5", OLD: "3000"}
    async with running(engine, **ring.settings) as app:
        wanted = spied(app, monkeypatch)
        for _ in range(4):
            async with client.post(app.url + CHAT, json=BODY, headers=bearer(ring.keys["acme"]) | said) as answer:
                await answer.read()
            if said:
                del said[next(iter(said))]
        async with client.post(app.url + CHAT, json=BODY, headers=bearer(ring.keys["calm"])) as answer:
            await answer.read()
        rows = [record.times.wanted_ttft_ms for record in app.control.history.recent]
    assert rows == [1_000.0, 2_000.5, 3_000.0, 4_000.0, None]
    times_s = [each.due_s for each in wanted]
    assert times_s[-1] is None
    assert times_s[:-1] == sorted(filter(None, times_s))
    assert all(OURS not in {name.lower() for name in seen.headers} for seen in engine.seen)


async def test_it_is_told_whether_the_deadline_was_kept(client: ClientSession, engine: FakeEngine) -> None:
    """In the final receipt, on the pages of past requests, and in a counter by priority. An answer in one piece has no
    first token, and is not counted."""
    asks = {"x-warmroute-final-receipt": "1", "x-warmroute-priority": "high"}
    async with running(engine) as app:
        for number, (wanted_ms, kept) in enumerate((("3600000", True), ("0.001", False))):
            headers = asks | {OURS: wanted_ms, "x-request-id": f"mine-{number}"}
            async with client.post(app.url + CHAT, json=BODY, headers=headers) as answer:
                told = json.loads((await answer.read()).rpartition(b": warmroute ")[2])
            assert (told["wanted_ttft_ms"], told["in_time"]) == (float(wanted_ms), kept)
            async with client.get(f"{app.url}/v1/warmroute/requests/mine-{number}") as page:
                assert (await page.json())["in_time"] is kept
        async with client.post(app.url + CHAT, json={**BODY, "stream": False}, headers={OURS: "1000"}) as answer:
            await answer.read()
        async with client.get(f"{app.admin_url}/metrics") as page:
            metrics = await page.text()
    series = re.compile(
        r'^warmroute_ttft_deadlines_total{model="m",priority="(\w+)",result="(\w+)"} 1\.0', re.MULTILINE
    )
    counted = series.findall(metrics)
    assert sorted(counted) == [("high", "in_time"), ("high", "late")]


async def test_of_low_priority_what_no_replica_can_make_is_429(client: ClientSession, engine: FakeEngine) -> None:
    """With Retry-After and a code, counted as shed and as a deadline without a token; of any other priority it is
    answered, late."""
    headers = {OURS: "0.001", "x-warmroute-priority": "low"}
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json=BODY, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (429, "slo_unreachable")
            assert int(answer.headers["Retry-After"]) >= 1
        async with client.post(app.url + CHAT, json=BODY, headers={OURS: "0.001"}) as answer:
            assert answer.status == 200
            await answer.read()
        async with client.get(f"{app.admin_url}/metrics") as page:
            metrics = await page.text()
    assert 'warmroute_shed_requests_total{code="slo_unreachable",model="m",priority="low"} 1.0' in metrics
    assert 'warmroute_ttft_deadlines_total{model="m",priority="low",result="none"} 1.0' in metrics
    assert len(engine.seen) == 1
