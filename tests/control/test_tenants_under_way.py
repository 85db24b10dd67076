"""Current requests of each tenant, on the metrics page and in the observatory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, mute, running
from tests.support.keyring import ADMIN, Keyring, bearer
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
NAMES = ("warmroute_tenant_in_flight_requests", "warmroute_tenant_queued_requests")


async def gauges(client: ClientSession, app: RouterServer) -> dict[str, dict[str, float]]:
    """Both gauges, by tenant."""
    async with client.get(app.admin_url + "/metrics", headers=bearer(ADMIN)) as response:
        lines = [line.partition("{") for line in (await response.text()).splitlines()]
    found: dict[str, dict[str, float]] = {name: {} for name in NAMES}
    for name, _, rest in lines:
        if name in found:
            label, _, value = rest.rpartition(" ")
            found[name][label.removeprefix('tenant="').removesuffix('"}')] = float(value)
    return found


def under_way(app: RouterServer) -> int:
    """Requests that are placed or wait."""
    return sum(counts.total() for counts in app.control.admission.count_by_tenant())


async def test_a_tenant_with_many_open_requests_is_seen_before_they_end(
    client: ClientSession, engine: FakeEngine, tmp_path: Path
) -> None:
    """Requests that are answered and requests that wait are counted by tenant, up to `auth.tenants_max` names; the page
    has them though none has ended. Afterwards each known tenant counts 0."""
    ring = Keyring(tmp_path, acme={}, batch={}, late={})
    engine.script.extend([mute, mute])
    async with running(
        engine, auth__tenants_max=2, admission__in_flight_max=2, admin__token=ADMIN, **ring.settings
    ) as app:
        asked = []

        async def ask(tenant: str) -> int:
            async with client.post(app.url + CHAT, json=BODY, headers=ring.of(tenant)) as response:
                await response.read()
                return response.status

        for number, tenant in enumerate(("batch", "acme", "batch", "batch", "late"), 1):
            asked.append(asyncio.create_task(ask(tenant)))
            await until(lambda number=number: under_way(app) == number)  # type: ignore[misc]
        assert await gauges(client, app) == {
            NAMES[0]: {"acme": 1.0, "batch": 3.0, "other": 1.0},
            NAMES[1]: {"acme": 0.0, "batch": 2.0, "other": 1.0},
        }
        async with client.get(app.admin_url + "/admin/observatory", headers=bearer(ADMIN)) as response:
            rows = (await response.json())["tenants"]
        assert {(row["tenant"], row["in_flight"], row["waiting"]) for row in rows} == {
            ("batch", 3, 2), ("acme", 1, 0), ("other", 1, 1)
        }  # fmt: skip
        engine.go_on.set()
        assert await asyncio.gather(*asked) == [200] * 5
        assert await gauges(client, app) == {name: {"acme": 0.0, "batch": 0.0} for name in NAMES}


async def test_without_a_keys_file_no_tenant_is_named(client: ClientSession, engine: FakeEngine) -> None:
    """A client's own `x-warmroute-tenant` makes no series."""
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json=BODY, headers={"x-warmroute-tenant": "acme"}) as response:
            assert response.status == 200
        async with client.get(app.admin_url + "/metrics") as response:
            text = await response.text()
        assert all(f"# TYPE {name} gauge" in text and f"{name}{{" not in text for name in NAMES)
