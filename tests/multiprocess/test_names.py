"""Names of models with several workers: the hub looks for those that no list has, and hears of lists that are wrong."""

from __future__ import annotations

from typing import Any

import aiohttp
import aiohttp.web

from tests.multiprocess.test_processes import CHAT, command, pytestmark
from tests.support.fakes import FakeEngine

__all__ = ["pytestmark"]

GONE = {"error": {"message": "The model `ad` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}}


def row(name: str, parent: str | None = None) -> dict[str, Any]:
    """A row of SGLang's page of models."""
    return {"id": name, "object": "model", "created": 1, "owned_by": "sglang", "root": name, "parent": parent}


async def test_names_with_workers() -> None:
    """`base:adapter`, an adapter that was just loaded, one that was lost, and names that are too long for any list."""
    rows = [row("m"), row("ad", "m")]
    async with FakeEngine(rows=rows[:1]) as plain, FakeEngine(rows=rows) as adapted:
        async with (
            command(plain, adapted, probe__models_interval_s="3600") as router,
            aiohttp.ClientSession() as client,
        ):

            async def ask(model: str) -> int:
                body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
                async with client.post(router.url + CHAT, json=body) as response:
                    await response.read()
                    return response.status

            assert [await ask(name) for name in ("m:ad", "ad")] == [200, 200]
            assert (len(plain.seen), len(adapted.seen)) == (0, 2)
            plain.rows = [*rows, row("new", "m")]
            assert [await ask(name) for name in ("new", "m:new", "n" * 5_000, "m")] == [200, 200, 404, 200]
            assert len(plain.seen) >= 2
            async with client.get(f"{router.url}/v1/models/{'n' * 5_000}") as response:
                assert response.status == 404
            adapted.rows = rows[:1]

            async def gone(engine: FakeEngine, _: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
                return aiohttp.web.json_response(GONE, status=404)

            adapted.script.extend([gone] * 9)
            assert [await ask("ad") for _ in range(6)] == [200] * 6
            async with client.get(router.admin_url + "/admin/replicas") as response:
                members = {each["id"]: each["models"] for each in (await response.json())["replicas"]}
            assert "ad" in members[plain.url]
            assert router.said("a worker left") == 0
