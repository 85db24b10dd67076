"""Replicas from DNS, by a resolver that says what it is told to."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from router.core.types.replicas import Replica
from router.engines.discovery import dns
from router.engines.discovery.dns import DnsDiscovery

V4, V6 = socket.AF_INET, socket.AF_INET6
Answer = list[str] | int  # addresses, or an error of getaddrinfo
NO_NAME, AGAIN = int(socket.EAI_NONAME), int(socket.EAI_AGAIN)


class Resolver:
    """Answers by family; counts questions, and how many were asked at once."""

    def __init__(self, v4: Answer = NO_NAME, v6: Answer = NO_NAME) -> None:
        self.answers: dict[int, Answer] = {V4: v4, V6: v6}
        self.asked = self.at_once = self.at_once_max = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, name: str, family: socket.AddressFamily) -> list[str]:
        """See dns.Resolve."""
        assert name == "vllm.default.svc"
        assert threading.current_thread() is not threading.main_thread()
        self.asked += 1
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        self.go_on.wait()
        self.at_once -= 1
        answer = self.answers[family]
        if isinstance(answer, int):
            raise socket.gaierror(answer, "said so")
        return answer


def discovery(resolver: Callable[..., Any] | None, **more: Any) -> DnsDiscovery:
    """That asks again at once."""
    told: dict[str, Any] = {"name": "vllm.default.svc", "port": 8000, "scheme": "http", "interval_s": 0.001} | more
    return DnsDiscovery(told.pop("name"), resolve=resolver, **told)


@pytest.fixture
async def sets() -> AsyncIterator[Callable[[DnsDiscovery], AsyncIterator[frozenset[Replica]]]]:
    """Watches that are closed at the end."""
    open_: list[Any] = []

    def watch(of: DnsDiscovery) -> AsyncIterator[frozenset[Replica]]:
        open_.append(of.watch())
        return open_[-1]  # type: ignore[no-any-return]

    async with asyncio.timeout(60):
        yield watch
        for each in open_:
            await each.aclose()


async def asks(resolver: Resolver, more: int = 4) -> None:
    """So many questions later."""
    until = resolver.asked + more
    while resolver.asked < until:
        await asyncio.sleep(0.001)


def urls(replicas: frozenset[Replica]) -> set[str]:
    """Ids."""
    return {replica.id for replica in replicas}


async def test_every_address_is_a_replica(sets: Any) -> None:
    """All addresses of the name, whatever their order or number, but for those of a link, as metadata services have; a
    set is yielded when it is another, and only then."""
    resolver = Resolver(["10.0.0.2", "169.254.169.254", "10.0.0.1", "10.0.0.2"])
    found = sets(discovery(resolver))
    assert urls(await anext(found)) == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}
    coming = asyncio.ensure_future(anext(found))
    resolver.answers[V4] = ["10.0.0.1", "10.0.0.2"]
    await asks(resolver)
    assert not coming.done()
    resolver.answers[V4] = ["10.0.0.3", "10.0.0.1"]
    assert urls(await coming) == {"http://10.0.0.1:8000", "http://10.0.0.3:8000"}


@pytest.mark.promise(
    "DNS and pods give addresses, never names, and no metadata, link-local or multicast ones.", "discovery"
)
async def test_addresses_of_the_second_family(sets: Any) -> None:
    """A name with addresses of IPv6 only has those, in brackets; a pod with one of each is one replica. Addresses of
    this machine's own link lead nowhere."""
    resolver = Resolver(v6=["fd00::1", "fe80::1", "fe80::1%eth0"])
    found = sets(discovery(resolver, scheme="https", port=443))
    assert urls(await anext(found)) == {"https://[fd00::1]:443"}
    resolver.answers[V4] = ["10.0.0.1"]
    assert urls(await anext(found)) == {"https://10.0.0.1:443"}
    coming = asyncio.ensure_future(anext(found))
    resolver.answers[V4] = AGAIN
    await asks(resolver)
    assert not coming.done(), "no answer about the first family is no reason for the second"
    coming.cancel()


SPECIAL = (
    "169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "0.0.0.0", "127.0.0.1", "127.8.8.8",
    "224.0.0.1", "255.255.255.255", "fd00:ec2::254", "fd20:ce::254", "::ffff:169.254.169.254", "::ffff:10.0.0.1",
    "64:ff9b::a9fe:a9fe", "::a9fe:a9fe", "2002:a9fe:a9fe::1", "::1", "::", "fe80::1", "ff02::1", "nowhere", "010.0.0.1",
)  # fmt: skip


@pytest.mark.promise(
    "DNS and pods give addresses, never names, and no metadata, link-local or multicast ones.", "discovery"
)
@pytest.mark.promise("Loopback addresses become replicas only if the settings permit it.", "discovery")
@pytest.mark.parametrize("address", SPECIAL)
async def test_whoever_writes_records_sends_the_router_nowhere_special(sets: Any, address: str) -> None:
    """Metadata services of clouds, this machine, and whatever is no host's address are not taken from DNS: neither
    beside a replica's address nor alone, where the view says why."""
    family = "v6" if ":" in address else "v4"
    beside = {family: [address, "fd00::1" if family == "v6" else "10.0.0.1"]}
    found = await anext(sets(discovery(Resolver(**beside))))
    assert urls(found) == {"http://[fd00::1]:8000" if family == "v6" else "http://10.0.0.1:8000"}
    resolver = Resolver(**{family: [address]})
    known = discovery(resolver)
    coming = asyncio.ensure_future(anext(sets(known)))
    await asks(resolver)
    assert not coming.done()
    assert address in known.status().why
    coming.cancel()


@pytest.mark.promise(
    "Two seconds after an outage the view is current; until then the last good one is used.", "discovery"
)
@pytest.mark.parametrize(("answer", "why"), [(AGAIN, "said so"), (NO_NAME, "has no addresses"), ([], "no addresses")])
async def test_the_last_good_set_is_kept(sets: Any, answer: Answer, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """A name server that fails, a name that is gone, an answer without addresses: nothing is yielded, the view is
    flagged with its age, and the log says so once; and once when it is well again."""
    caplog.set_level(logging.INFO)
    now_s = 100.0
    resolver = Resolver(["10.0.0.1"])
    known = discovery(resolver, clock=lambda: now_s)
    found = sets(known)
    before = known.status()
    assert (before.fresh, before.replicas) == (False, 0)
    await anext(found)
    status = known.status()
    assert (status.fresh, status.why, status.stale_s, status.errors, status.replicas) == (True, "", 0.0, 0, 1)
    coming = asyncio.ensure_future(anext(found))
    resolver.answers[V4] = answer
    await asks(resolver, 8)
    now_s = 160.0
    status = known.status()
    assert (status.fresh, status.stale_s, status.replicas) == (False, 60.0, 1)
    assert status.errors > 1
    assert why in status.why
    assert not coming.done()
    resolver.answers[V4] = ["10.0.0.2"]
    assert urls(await coming) == {"http://10.0.0.2:8000"}
    assert known.status().fresh
    said = [(record.levelname, record.message.partition(":")[0]) for record in caplog.records]
    assert said == [
        ("INFO", "discovery is current"), ("WARNING", "discovery is stale"), ("INFO", "discovery is current")
    ]  # fmt: skip


async def test_a_resolver_that_hangs(sets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is flagged, and waited for: there are never two questions at once, nor is the event loop held up."""
    monkeypatch.setattr(dns, "ANSWER_S", 0.0)
    resolver = Resolver(["10.0.0.1"])
    resolver.go_on.clear()
    known = discovery(resolver)
    coming = asyncio.ensure_future(anext(sets(known)))
    while "no answer" not in known.status().why:
        await asyncio.sleep(0.001)
    assert (known.status().fresh, known.status().errors) == (False, 1)
    resolver.go_on.set()
    assert urls(await coming) == {"http://10.0.0.1:8000"}
    assert known.status().fresh
    assert resolver.at_once_max == 1


@pytest.mark.parametrize("flagged", [False, True])
async def test_whoever_stops_waits_for_nobody(
    flagged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closed while a question is under way: at once, and the answer that comes later is nobody's."""
    if flagged:
        monkeypatch.setattr(dns, "ANSWER_S", 0.0)
    resolver = Resolver(["10.0.0.1"])
    resolver.go_on.clear()
    watch: Any = discovery(resolver).watch()
    coming = asyncio.ensure_future(anext(watch))
    while not resolver.asked:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    await watch.aclose()
    resolver.go_on.set()
    while resolver.at_once:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)  # what it says is heard, and changes nothing
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_name_that_is_none(sets: Any) -> None:
    """What breaks the resolver itself is one more failure, not the end."""

    def broken(*_: object) -> list[str]:
        raise UnicodeError("label too long")

    known = discovery(broken)
    coming = asyncio.ensure_future(anext(sets(known)))
    while known.status().errors < 3:
        await asyncio.sleep(0.001)
    assert known.status().why == "label too long"
    coming.cancel()


async def test_the_machine_s_own_resolver(sets: Any) -> None:
    """`localhost`, by getaddrinfo; and a name that no resolver has."""
    assert urls(await anext(sets(discovery(None, name="localhost", loopback=True)))) == {"http://127.0.0.1:8000"}
    known = discovery(None, name="nowhere.invalid")
    coming = asyncio.ensure_future(anext(sets(known)))
    while not known.status().errors:
        await asyncio.sleep(0.001)
    assert not known.status().fresh
    coming.cancel()
