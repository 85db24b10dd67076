"""What is decided before an answer is the same by either frontend: the same requests are sent to both of one router."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from router.core.types.cache_misses import MissReason
from router.router_server import RouterServer
from tests.extproc.asking import CHAT, asking, chat, error_of, picking, set_headers
from tests.support.fakes import FakeEngine
from tests.support.keyring import Keyring
from tests.support.waiting import until

TOOLS = [{"name": "b"}, {"name": "a", "x": [2, 1]}]


async def by_proxy(
    client: ClientSession, app: RouterServer, body: bytes, headers: dict[str, str]
) -> tuple[int, Any, Any]:
    """Status, the body of a refusal, and headers of the answer, straight to the proxy."""
    headers = {"content-type": "application/json"} | headers
    async with client.post(app.http.url + CHAT, data=body, headers=headers) as answer:
        content = await answer.read()
        return answer.status, json.loads(content) if answer.status >= 400 else None, dict(answer.headers)


async def by_picker(app: RouterServer, body: bytes, headers: dict[str, str]) -> tuple[int, Any, dict[str, str], bytes]:
    """The same by the picker, and the body that the engine is to get."""
    async with asking(app) as it:
        response = await it.pick(body, headers=headers)
        if response.HasField("immediate_response"):
            status, error = error_of(response)
            return status, error, set_headers(response), b""
        sent = response.request_body.response.body_mutation.body or body
        await it.answer()
        answer = await it.hear()
        assert answer is not None
        await it.finish()
        return 200, None, set_headers(answer), sent


async def test_bodies_are_the_same(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Tools are sorted, and salts of isolated tenants spliced in, byte for byte as at the proxy; usage is asked for
    only where the answer comes by."""
    engine.owned_by = "vllm"
    ring = Keyring(tmp_path, acme={}, apart={"isolate": True})
    settings = {"listen.mode": "both", "insights.normalize_tools": ["sort_tools"], **ring.settings}
    async with picking(engine, **settings) as app:
        for tenant in ("acme", "apart"):
            body, headers = chat("x", tools=TOOLS), ring.of(tenant)
            status, *_ = await by_proxy(client, app, body, headers)
            assert status == 200
            by_http = engine.seen[-1].body
            assert by_http.index(b'"a"') < by_http.index(b'"b"')
            assert (b"cache_salt" in by_http) is (tenant == "apart")
            assert (await by_picker(app, body, {k.lower(): v for k, v in headers.items()}))[3] == by_http


async def test_receipts_and_misses_are_the_same(client: ClientSession, engine: FakeEngine) -> None:
    """Two turns at a new router, by the proxy and by the picker: receipts name the same replica, reason and kinds of
    misses, and the metrics and the dashboard's decisions have all of them. How many tokens a byte is, only the proxy
    has learned."""
    receipts: dict[str, list[tuple[str, ...]]] = {"proxy": [], "picker": []}
    for frontend, kept in receipts.items():
        async with picking(engine, **{"listen.mode": "both"}) as app:
            messages = [{"role": "user", "content": "tell me more " * 300}]
            for turn in range(2):
                body = json.dumps({"model": "m", "messages": messages}).encode()
                answer = await (by_proxy(client, app, body, {}) if frontend == "proxy" else by_picker(app, body, {}))
                headers = {name.lower(): value for name, value in answer[2].items()}
                kinds = (each.partition("=")[0] for each in headers["x-warmroute-miss"].split(","))
                kept.append((headers["x-warmroute-replica"], headers["x-warmroute-reason"], *kinds))
                assert (int(headers["x-warmroute-predicted-cached-tokens"]) > 0) is (turn > 0)
                messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "else " * 200}]
            await until(lambda app=app: len(app.control.history.recent) == 2)
            assert [record.cache.miss is not None for record in app.control.history.recent] == [True] * 2
            page = (await app.control.metrics.page_in_slices()).decode()
            assert re.findall(r"^warmroute_requests_total{.*} ([1-9].*)$", page, re.MULTILINE) == ["2.0"]
            async with client.get(app.admin_url + "/admin/decisions") as decisions:
                assert len((await decisions.json())["decisions"]) == 2
    assert receipts["proxy"] == receipts["picker"]
    assert receipts["picker"] == [
        (engine.url, "only", MissReason.COLD, MissReason.TAIL),
        (engine.url, "only", MissReason.NEW, MissReason.TAIL),
    ]


async def test_refusals_are_the_same(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Status and error body of every kind of refusal: a key that is none, a model that is not allowed, one that is
    unknown, a body that is no JSON, one without messages, a compressed one, a priority that is none."""
    ring = Keyring(tmp_path, acme={"models": ["m"]})
    async with picking(engine, **{"listen.mode": "both", **ring.settings}) as app:
        good = {key.lower(): value for key, value in ring.of("acme").items()}
        for body, headers in (
            (chat(), {}),
            (chat(), {"authorization": "Bearer wr-none"}),
            (chat().replace(b'"m"', b'"other"'), good),
            (b"no json", good),
            (b'{"model": "m"}', good),
            (chat(), good | {"content-encoding": "br"}),
            (chat(), good | {"x-warmroute-priority": "at once"}),
        ):
            status, error, _ = await by_proxy(client, app, body, headers)
            assert (await by_picker(app, body, headers))[:2] == (status, error)
            assert status >= 400 or b"messages" not in body
