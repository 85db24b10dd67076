"""Addresses behind the name in an endpoint: in which order they are tried."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from router.engines.kv_events.addresses import ADDRESSES_MAX, Addresses

NAMES: dict[str, list[str]] = {}


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """NAMES has all names that there are."""

    async def getaddrinfo(_loop: Any, host: str, port: Any, **_: Any) -> Any:
        if host not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(0, 0, 0, "", (address, 0)) for address in NAMES[host]]

    NAMES.clear()
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)


async def test_each_address_in_turn() -> None:
    """And from the first again, as the name is resolved then."""
    NAMES["r"] = ["fd00::1", "10.0.0.1", "fd00::1"]
    addresses = Addresses("tcp://r:5557")
    assert [await addresses.next() for _ in range(3)] == [
        "tcp://[fd00::1]:5557",
        "tcp://10.0.0.1:5557",
        "tcp://[fd00::1]:5557",
    ]
    NAMES["r"] = ["10.0.0.9"]
    assert [await addresses.next() for _ in range(2)] == ["tcp://10.0.0.1:5557", "tcp://10.0.0.9:5557"]


async def test_the_likely_one_is_tried_first() -> None:
    """That at which probes reached the host, and before it the one that worked; neither if the name lost it."""
    NAMES["r"] = ["fd00::1", "10.0.0.1", "10.0.0.2"]
    addresses = Addresses("tcp://r:1", {"r": "10.0.0.2"}.__getitem__)
    assert await addresses.next() == "tcp://10.0.0.2:1"
    assert (await addresses.next(), addresses.address) == ("tcp://[fd00::1]:1", "")
    addresses.works()
    assert addresses.address == "fd00::1"
    assert [await addresses.next() for _ in range(2)] == ["tcp://[fd00::1]:1", "tcp://10.0.0.2:1"]
    addresses.works()
    NAMES["r"] = ["10.0.0.1"]
    assert await addresses.next() == "tcp://10.0.0.1:1"


async def test_an_address_that_is_sure_is_taken_until_it_fails() -> None:
    """Without a look at the name."""
    addresses = Addresses("tcp://r:1")
    assert await addresses.next(sure="10.0.0.5") == "tcp://10.0.0.5:1"
    NAMES["r"] = ["10.0.0.1"]
    assert await addresses.next(sure="10.0.0.5") == "tcp://10.0.0.1:1"
    addresses.works()
    assert await addresses.next(sure="10.0.0.5") == "tcp://10.0.0.5:1"


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://10.0.0.1:5557",
        "tcp://[fd00::1]:5557",
        "ipc:///tmp/x",
        "tcp://eth0;10.0.0.1:5",
        "tcp://r:*",
        "",
        "r",
        "tcp://:5",
    ],
)
async def test_what_has_no_name_is_left_as_it_is(endpoint: str) -> None:
    """Addresses, other transports, and what libzmq has to judge."""
    NAMES["r"] = ["10.0.0.1"]
    assert await Addresses(endpoint).next(sure="10.0.0.5") == endpoint


async def test_a_name_that_is_unknown_or_has_very_many_addresses() -> None:
    """The one is left to libzmq, and resolved again each time; of the other some are tried."""
    addresses = Addresses("tcp://r:1")
    assert await addresses.next() == "tcp://r:1"
    NAMES["r"] = [f"10.0.0.{n}" for n in range(100)]
    tried = {await addresses.next() for _ in range(3 * ADDRESSES_MAX)}
    assert len(tried) == ADDRESSES_MAX
