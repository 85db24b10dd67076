"""What `/admin/replicas` says of roles, handshakes, pairs and pulls."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.core.types.disagg_types import KvConnector
from router.router_server import RouterServer
from tests.support import fakes
from tests.support.splitting import hub_fleet, warm_pairs
from tests.support.waiting import until


async def rows(app: RouterServer) -> list[dict[str, Any]]:
    """All replicas as the page has them, those that prefill first."""
    async with ClientSession() as client, client.get(app.admin_url + "/admin/replicas") as response:
        found: list[dict[str, Any]] = (await response.json())["replicas"]
        return sorted(found, key=lambda row: str(row["role"] != "prefill") + str(row["id"]))


@pytest.mark.parametrize("handshake", [KvConnector.NIXL, KvConnector.MOONCAKE])
async def test_roles_and_pairs_are_told(handshake: KvConnector) -> None:
    """Who prefills, where it is asked, and how many pairs take traffic, rest, or are to be warmed."""
    async with hub_fleet(handshake) as (engines, app):
        await until(lambda: warm_pairs(app) == 2)
        prefill, *decode = await rows(app)
        address = "" if handshake is KvConnector.NIXL else engines.addresses[0]
        pairs = {"warm": 2, "new": 0, "resting": 0}
        assert (prefill["id"], prefill["role"]) == (engines.urls[0], "prefill")
        assert prefill["split"] == {"handshake": handshake, "address": address, "answers": True, "pairs": pairs}
        assert [(row["role"], row["split"]["pairs"]["warm"]) for row in decode] == [("decode", 1)] * 2
        assert {row["pull_address"] for row in (prefill, *decode)} == {None}
        app.router.disaggregator.pair_broke(engines.urls[0], engines.urls[1], now_s=monotonic())
        assert (await rows(app))[0]["split"]["pairs"] == {"warm": 1, "new": 0, "resting": 1}
        app.router.disaggregator.set_connector(engines.urls[0], None, "")
        silent = (await rows(app))[0]["split"]
        assert (silent["answers"], silent["pairs"]) == (False, {"warm": 1, "new": 0, "resting": 1})


async def test_without_roles_nothing_is_told() -> None:
    """A replica that does everything for itself has the role of all, no handshake and no address."""
    async with fakes.FakeEngine() as engine, RouterServer(resolve(fakes.settings(engine.url))) as app:
        await app.control.probe_now()
        (row,) = await rows(app)
        assert (row["role"], row["split"], row["pull_address"]) == ("both", None, None)
