"""Agents' clients, as recorded, through both frontends: what pages, groups and traces tell of them, and of whom not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.telemetry.request_record import RequestRecord, session_key
from tests.extproc.asking import asking, picking
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import Keyring
from tests.support.waiting import until

CAPTURES = Path(__file__).parents[1] / "core/prompts/agents"
PROMPTS: dict[str, dict[str, Any]] = {"/v1/responses": {"input": "Hello"}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
RECORDED = ("claude-code", "codex", "opencode")


def captured(client: str) -> list[tuple[str, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Path, headers, body and what is meant of each request that a client sent."""
    requests = json.loads((CAPTURES / f"{client}.json").read_text())["requests"]
    return [
        (each["path"], dict(each["headers"]), {"model": "m", **PROMPTS.get(each["path"], CHAT), **each["body"]}, meant)
        for each in requests
        if (meant := each["expect"]) is not None
    ]


def check(record: RequestRecord, meant: dict[str, Any]) -> None:
    """A record has the keys of the client's names, and none of its words."""
    assert record.client.agent == meant["client"] + ("/sub" if meant["parent"] else "")
    assert record.client.agent_id == session_key(meant["conversation"].encode())
    assert record.client.agent_parent == (session_key(meant["parent"].encode()) if meant["parent"] else "")
    assert record.client.session == session_key(meant["session"].encode())


@pytest.mark.parametrize("of", RECORDED)
async def test_the_proxy_knows_agents(client: ClientSession, engine: FakeEngine, of: str) -> None:
    """Every request is recorded under its conversation and its parent; the engine gets the headers as they came; a
    session's requests are found by the name that its client gave it, and groups tell sub-agents apart."""
    async with running(engine) as app:
        for path, headers, body, _ in captured(of):
            async with client.post(app.url + path, json=body, headers=headers) as answer:
                assert answer.status == 200
            passed = {name.lower(): value for name, value in engine.seen[-1].headers.items()}
            named = {name.lower(): value for name, value in headers.items() if name.lower() != "user-agent"}
            assert named.items() <= passed.items()
        records = list(app.control.pages.decisions)
        for record, (*_, meant) in zip(records, captured(of), strict=True):
            check(record, meant)
        session = captured(of)[0][3]["session"]
        async with client.get(f"{app.admin_url}/admin/decisions", params={"session": session}) as page:
            rows = (await page.json())["decisions"]
        async with client.get(f"{app.admin_url}/admin/observatory") as page:
            groups = (await page.json())["groups"]
    ours = [meant for *_, meant in captured(of) if meant["session"] == session]
    assert len(rows) == len(ours)
    assert session not in json.dumps(rows)
    assert {group["agent"] for group in groups} == {of, f"{of}/sub"}


@pytest.mark.parametrize("of", RECORDED)
@pytest.mark.parametrize("mode", ["buffered", "none"])
async def test_the_picker_knows_agents(engine: FakeEngine, of: str, mode: str) -> None:
    """By their headers alone where bodies do not come by."""
    async with picking(engine) as app:
        for path, headers, body, _ in captured(of):
            async with asking(app, mode) as it:
                lower = {name.lower(): value for name, value in headers.items()}
                if mode == "buffered":
                    await it.pick(json.dumps(body).encode(), path=path, headers=lower)
                else:
                    await it.head(path, headers=lower)
                    assert await it.hear() is not None
        await until(lambda: len(app.control.pages.decisions) == len(captured(of)))
        records = list(app.control.pages.decisions)
    found = sorted((record.client.agent, record.client.agent_id, record.client.agent_parent) for record in records)
    meant = [(each["client"], each["conversation"], each["parent"]) for *_, each in captured(of)]
    assert found == sorted(
        (f"{name}/sub" if parent else name, session_key(own.encode()), session_key(parent.encode()) if parent else "")
        for name, own, parent in meant
    )


async def test_isolated_tenants_never_meet(client: ClientSession, engine: FakeEngine, tmp_path: Path) -> None:
    """Two isolated tenants whose sessions have one name: their records share no key, and the name finds a tenant's
    requests only where that tenant is asked for."""
    ring = Keyring(tmp_path, one={"isolate": True}, two={"isolate": True})
    path, headers, body, meant = captured("opencode")[2]
    engine.owned_by = "vllm"
    async with running(engine, **ring.settings) as app:
        for tenant in ring.keys:
            async with client.post(app.url + path, json=body, headers={**headers, **ring.of(tenant)}) as answer:
                assert answer.status == 200
        records = list(app.control.pages.decisions)
        found = {}
        for tenant in ("", *ring.keys):
            query = {"session": meant["session"]} | ({"tenant": tenant} if tenant else {})
            async with client.get(f"{app.admin_url}/admin/decisions", params=query) as page:
                found[tenant] = [row["tenant"] for row in (await page.json())["decisions"]]
    assert found == {"": [], "one": ["one"], "two": ["two"]}
    keys = [{record.client.session, record.client.agent_id, record.client.agent_parent} for record in records]
    assert not keys[0] & keys[1]
    assert session_key(meant["session"].encode()) not in keys[0] | keys[1]


async def test_a_session_that_is_over_is_let_go(client: ClientSession, engine: FakeEngine) -> None:
    """The router says so by what it still knows: a request that ends its conversation leaves nothing to come back to,
    wherever the header stands."""
    async with running(engine) as app:
        for final in ("", "true"):
            headers = {"x-dynamo-session-id": "s", **({"x-dynamo-session-final": final} if final else {})}
            body = {"model": "m", "messages": [{"role": "user", "content": "a word " * 500}]}
            async with client.post(f"{app.url}/v1/chat/completions", json=body, headers=headers) as answer:
                await answer.read()
            assert len(app.router.conversations) == (0 if final else 1)
