"""Replicas from DNS: all addresses of a headless Service's name, for those who give no API access.

The resolver of the machine is asked (getaddrinfo), as everything else in a pod asks it: hosts file, search domains and
`ndots` hold here too, and no library has to know them. It blocks, and may for half a minute where no name server
answers; so each question has a thread of its own, never two at once, and a daemon, which holds up neither other
threads' work nor our exit.

DNS knows little. It does not say who restarted, who is about to go, nor when an answer changes; a Service's records
have the ready pods only, as old as the answer's time to live. What follows from that:

- No answer, or one that fails, changes nothing: the last good set is kept, and flagged.
- A name without addresses is kept and flagged as well. A Service scaled to zero says the same as a name server that
  has just lost its zone, and probes take out the dead anyhow.
- Of a name with addresses of both families, those of IPv4 count: pods of a dual-stack Service have one of each, and
  would be replicas twice, each with half of what is known of one cache.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress

from router.core.facts.replicas import Replica
from router.engines.discovery import Status

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # after which a question that has no answer is flagged; it is waited for all the same
NOT_THERE = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5), getattr(socket, "EAI_ADDRFAMILY", -9))
FAMILIES = (socket.AF_INET, socket.AF_INET6)

Resolve = Callable[[str, socket.AddressFamily], Iterable[str]]


class NoAddresses(OSError):
    """There is no such name, or it has no addresses."""


class DnsDiscovery:
    """Asks every `interval_s`, and yields the set when it is another."""

    source = "dns"

    def __init__(
        self,
        name: str,
        *,
        port: int,
        scheme: str,
        interval_s: float,
        resolve: Resolve | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resolve(name, family)` gives addresses, or raises OSError; it may block."""
        self._name, self._port, self._scheme, self._interval_s = name, port, scheme, interval_s
        self._resolve = resolve or _getaddrinfo
        self._clock = clock
        self._found: frozenset[Replica] = frozenset()
        self._why = "not answered yet"
        self._good_s = clock()  # of the last good answer
        self._errors = 0

    def status(self) -> Status:
        """Stale since the last good answer."""
        stale_s = self._clock() - self._good_s if self._why else 0.0
        return Status(not self._why, self._why, stale_s, self._errors, len(self._found))

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """See Discovery."""
        given: frozenset[Replica] | None = None
        while True:
            try:
                addresses = await self._ask()
            except OSError as error:
                self._failed(error.strerror or str(error) or type(error).__name__)
            else:
                self._learn(addresses)
                if self._found != given:
                    given = self._found
                    yield given
            await asyncio.sleep(self._interval_s)

    async def _ask(self) -> list[str]:
        """However long it takes. Raises OSError."""
        answer = _in_thread(lambda: _addresses(self._resolve, self._name))
        await asyncio.wait({answer}, timeout=ANSWER_S)
        if not answer.done():
            self._failed(f"no answer for {ANSWER_S:.0f} s")
        said = await answer
        if isinstance(said, OSError):
            raise said
        return said

    def _learn(self, addresses: list[str]) -> None:
        self._good_s = self._clock()
        if self._why:
            fields = {"source": self.source, "name": self._name, "replicas": len(addresses)}
            log.info("discovery is fresh", extra={"fields": fields})
        self._why = ""
        hosts = (f"[{address}]" if ":" in address else address for address in addresses)
        self._found = frozenset(Replica(f"{self._scheme}://{host}:{self._port}") for host in hosts)

    def _failed(self, why: str) -> None:
        """Said once, until it is well again."""
        self._errors += 1
        if self._errors == 1 or not self._why:
            fields = {"source": self.source, "name": self._name, "why": why, "kept": len(self._found)}
            log.warning("discovery is stale: the last good set is kept", extra={"fields": fields})
        self._why = why


def _addresses(resolve: Resolve, name: str) -> list[str]:
    """Of the first family that there are any of. Raises OSError, and NoAddresses when there are none for certain."""
    for family in FAMILIES:
        try:
            said = list(resolve(name, family))
        except socket.gaierror as error:
            if error.errno not in NOT_THERE:
                raise
            continue
        if addresses := sorted(set(filter(_plain, said))):
            return addresses
    raise NoAddresses(f"{name} has no addresses")


def _plain(address: str) -> bool:
    """Not one that means anything only on this machine's own link."""
    try:
        return not ipaddress.ip_address(address).is_link_local
    except ValueError:
        return False


def _getaddrinfo(name: str, family: socket.AddressFamily) -> Iterable[str]:
    return [str(address[0]) for *_, address in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)]


def _in_thread(ask: Callable[[], list[str]]) -> asyncio.Future[list[str] | OSError]:
    """A failure is returned, as nobody may be there any more to catch it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str] | OSError] = loop.create_future()

    def settle(said: list[str] | OSError) -> None:
        if not answer.done():  # else nobody waits any more
            answer.set_result(said)

    def run() -> None:
        said: list[str] | OSError
        try:
            said = ask()
        except OSError as error:
            said = error
        except Exception as error:  # a name that is none by IDNA's rules: UnicodeError
            said = OSError(str(error))
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, said)

    threading.Thread(target=run, name="dns", daemon=True).start()
    return answer
