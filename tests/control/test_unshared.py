"""Routers that send to the same replicas and share nothing: when a router says so, and where."""

from __future__ import annotations

import logging

import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.config.schema import PeeringSettings
from router.control.unshared import UNSHARED_S, UnsharedRouters, router_name
from router.router_server import RouterServer
from tests.support.fakes import settings
from tests.support.waiting import until

EVENT = "routers_unshared"


class Senders:
    """What a router sees of others, set by a test."""

    def __init__(self, routers_expected: int = 0, *, has_store: bool = False) -> None:
        self.share = 1.0
        self.peers: list[str] = []
        store = "redis://127.0.0.1" if has_store else ""
        peering = PeeringSettings(router_id="r", expected_routers=routers_expected, redis_url=store)
        self.condition = UnsharedRouters(peering, share=lambda: self.share, peers=lambda: self.peers)

    def at(self, now_s: float, share: float) -> str:
        """The condition after a look at this time."""
        self.share = share
        self.condition.check(now_s)
        return self.condition.why


@pytest.mark.parametrize(("expected", "store", "holds"), [(0, False, 0), (1, False, 0), (2, False, 1), (3, True, 0)])
def test_routers_that_are_expected_without_a_store(
    expected: int, store: bool, holds: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The settings say that there are several and name no store: that is said at once, and once."""
    seen = Senders(expected, has_store=store)
    for now_s in range(5):
        assert bool(seen.at(now_s, 1.0)) is bool(holds)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * holds


def test_others_that_send_are_seen_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Engines count more than this router sent, for a minute without a break, and no router reports it: a line when it
    begins and one when it ends, with how much others send."""
    caplog.set_level(logging.INFO)
    seen = Senders()
    assert not seen.at(0, 0.6)
    assert not seen.at(UNSHARED_S - 1, 0.6)
    assert not seen.at(UNSHARED_S, 1.0), "a break"
    assert not seen.at(UNSHARED_S + 1, 0.6)
    assert not seen.at(2 * UNSHARED_S, 0.6)
    assert "40%" in seen.at(2 * UNSHARED_S + 1, 0.6)
    assert seen.at(2 * UNSHARED_S + 2, 0.55)
    assert not seen.at(2 * UNSHARED_S + 3, 0.95)
    found = [(record.levelname, vars(record)["event"]) for record in caplog.records]
    assert found == [("WARNING", EVENT), ("INFO", EVENT)]


def test_peers_that_report_are_no_such_others() -> None:
    """With a peer whose work is received, the rest comes from clients that pass by all routers, which is another
    matter."""
    seen = Senders(2, has_store=True)
    seen.peers = ["other"]
    for now_s in range(0, 600, 10):
        assert not seen.at(now_s, 0.5)
    assert seen.condition.status() == {"name": "r", "peers": ["other"], "unshared": ""}


def test_names_of_routers() -> None:
    """The settings' name, or one that differs between routers of one machine."""
    assert router_name(PeeringSettings(router_id="a"), 8001) == "a"
    assert router_name(PeeringSettings(), 8001).endswith(":8001")


async def test_pages_say_it(client: ClientSession) -> None:
    """`/admin/replicas` and the dashboard's data have the condition, with the router's name; a metric has it too."""
    async with RouterServer(resolve(settings(peering__expected_routers=2, peering__router_id="one"))) as app:
        await until(app.control.unshared.explain)
        async with client.get(app.admin_url + "/admin/replicas") as response:
            page = await response.json()
        async with client.get(app.admin_url + "/admin/observatory") as response:
            data = await response.json()
        async with client.get(app.admin_url + "/metrics") as response:
            metrics = (await response.text()).splitlines()
    assert "warmroute_routers_unshared 1.0" in metrics
    assert page["sharing"] is None
    assert page["unshared"] == data["router"]["unshared"] != ""
    assert (data["router"]["name"], data["router"]["peers"]) == ("one", [])
