"""Pages of what went wrong have no field that the OpenAPI document does not name, and no value of another type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
from aiohttp import ClientSession

from tests.admin.api.closed import closed
from tests.admin.api.test_document import SAID
from tests.support.fakes import FakeEngine, breaks_midway, reset, running, status

CHAT = "/v1/chat/completions"
PAGES = {
    "/admin/replicas": "Replicas", "/admin/decisions?limit=500": "Decisions", "/admin/series": "Series",
    "/admin/index": "Index", "/admin/observatory": "Observatory", "/admin/templates": "Templates",
    "/admin/advice": "Advice", "/admin/prewarm": "WarmState",
}  # fmt: skip


def problems(schema: str, value: Any) -> list[str]:
    """What a value has that the schema does not."""
    root = {"$ref": f"#/components/schemas/{schema}", "components": closed(SAID["components"])}
    errors = jsonschema_rs.validator_for(root).iter_errors(value)
    return [f"{'/'.join(map(str, error.instance_path))}: {error.message[:200]}" for error in errors]


def test_what_is_not_described_is_found() -> None:
    """An unknown field, one that is missing and a value of another type are each a problem."""
    held = {"http://a": {"blocks": 1, "blocks_max": 2}}
    good = {"keys": 1, "bytes": 2, "bytes_max": 3, "replicas": held, "state": None}
    assert problems("Index", good) == []
    for bad in ({**good, "x": 1}, {**good, "keys": "1"}, {**good, "replicas": {"a": {"blocks": 1}}}, {"keys": 1}):
        assert len(problems("Index", bad)) >= 1, bad


async def test_rows_of_what_failed(client: ClientSession, tmp_path: Path) -> None:
    """Retries, streams that break, engines' errors, unknown models, changed tools, a replica that is gone, with a
    history in a file and texts shown: every page is as described, for operators and for whoever sent a request."""
    options = {"admin__history_path": str(tmp_path / "history.db"), "insights__excerpts": True}
    async with FakeEngine() as first, FakeEngine() as second, running(first, second, **options) as app:
        for n in range(24):
            for engine in (first, second):
                engine.script.clear()
                engine.script.extend([(breaks_midway, status(400), reset, status(429))[n % 4]] if n % 3 else [])
            names = [f"tool{i}" for i in range(4)][:: -1 if n % 5 == 4 else 1]
            tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]
            texts = {"system": "You are an agent. " * 200, "user": f"{n % 2} " * 900}
            messages = [{"role": role, "content": text} for role, text in texts.items()]
            body = {"model": "m" if n != 7 else "none", "messages": messages, "tools": tools, "stream": n % 2 == 0}
            headers = {"x-request-id": f"r{n}", "x-session-id": f"s{n % 3}"}
            async with client.post(app.url + CHAT, json=body, headers=headers) as response:
                await response.content.read()
        await second.stop()
        await app.control.probe_now()
        warmed = {"templates": 2, "wait": True}
        async with client.post(app.admin_url + "/admin/prewarm", json=warmed) as response:
            assert problems("WarmDone", await response.json()) == []
        for path, schema in PAGES.items():
            async with client.get(app.admin_url + path) as response:
                page = await response.json()
            assert problems(schema, page) == [], path
            if schema == "Decisions":
                assert {row["ending"] for row in page["decisions"]} >= {"ok", "refused"}
                assert any(row["retries"] for row in page["decisions"])
        for n in range(24):
            async with client.get(f"{app.url}/v1/warmroute/requests/r{n}") as response:
                assert problems("OwnRequest", await response.json()) == [], n
