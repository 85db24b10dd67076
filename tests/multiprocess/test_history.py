"""What is kept of requests, with several workers: the hub alone keeps it, whoever answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.multiprocess.test_processes import CHAT, body, command, pytestmark
from tests.support.fakes import FakeEngine
from tests.support.keyring import ADMIN, SECRET, Keyring, bearer

__all__ = ["pytestmark"]

REQUESTS = 24


async def told(url: str, headers: dict[str, str], code: int = 200) -> Any:
    """A page's JSON, on a connection of its own, and so by any worker."""
    async with ClientSession() as session, session.get(url, headers=headers) as answer:
        assert answer.status == code, await answer.text()
        return await answer.json()


@pytest.mark.promise("The outcome of a request is shown to its tenant only.", "tenants")
@pytest.mark.long
@pytest.mark.timeout(120)
async def test_workers_and_hub_tell_the_same(tmp_path: Path) -> None:
    """Every request is found once, with candidates, session and final counts, whichever worker answered it; each worker
    shows a tenant its own requests and no other's; and after a restart everything is still there."""
    ring = Keyring(tmp_path, acme={}, evil={})
    options = {"auth__keys_file": str(ring.file), "auth__secret": SECRET, "auth__receipts": "true"}
    options |= {"admin__token": ADMIN, "admin__history_path": str(tmp_path / "history.db")}
    admin, ids = bearer(ADMIN), [f"r{n}" for n in range(REQUESTS)]
    async with FakeEngine() as engine, FakeEngine() as other:
        for run in range(2):
            async with command(engine, other, **options) as running:
                if run == 0:
                    for id_ in ids:
                        headers = {"x-request-id": id_, "x-session-id": "mine"} | ring.of("acme")
                        async with ClientSession() as session:
                            async with session.post(
                                running.url + CHAT, json=body(id_ * 999), headers=headers
                            ) as answer:
                                assert answer.status == 200
                page: dict[str, Any] = {"decisions": []}
                while len(page["decisions"]) < REQUESTS:  # the last reports of workers may be on their way
                    page = await told(f"{running.admin_url}/admin/decisions?session=mine&limit=500", admin)
                assert sorted(row["id"] for row in page["decisions"]) == sorted(ids)
                assert page["kept"]["state"] == "ok"
                for row in page["decisions"]:
                    assert len(row["candidates"]) == row["weighed"] == 2
                    assert (row["tenant"], row["usage"]["cached_tokens"]) == ("acme", 32)
                for id_ in ids[:8]:
                    row = await told(f"{running.url}/v1/warmroute/requests/{id_}", ring.of("acme"))
                    assert row["id"] == id_
                    assert row["hit_tokens"] + sum(row["miss"].values()) == 100
                    assert "candidates" not in row
                    missing = await told(f"{running.url}/v1/warmroute/requests/no", ring.of("evil"), 404)
                    assert await told(f"{running.url}/v1/warmroute/requests/{id_}", ring.of("evil"), 404) == missing
