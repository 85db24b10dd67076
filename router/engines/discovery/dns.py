"""Replicas from DNS: all addresses of a headless Service's name, where there is no access to the API server.

The machine's resolver is asked (getaddrinfo), as every other program in a pod asks it: hosts file, search domains and
`ndots` apply, and no library has to know them. The call blocks, for up to half a minute where no name server answers;
so each has a thread of its own, never two at once, and a daemon thread, which delays neither other threads' work nor
the exit of the process.

DNS knows little. It does not say which pod restarted or is about to go, nor when an answer changes; a Service's
records have only the ready pods, as old as the answer's time to live. Therefore:

- No answer, or a failure, changes nothing: the last good set is kept, and flagged as stale.
- A name without addresses changes nothing either. A Service scaled to zero looks like a name server that has just lost
  its zone, and probes take out dead replicas anyway.
- If a name has addresses of both families, only IPv4 counts: pods of a dual-stack Service have one of each, and would
  be replicas twice, each with half of the knowledge of one cache.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress

from router.core.facts.replicas import Replica
from router.engines.discovery import Status
from router.settings.networks import usual

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # after that the view is flagged as stale, while the answer is still waited for
NOT_THERE = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5), getattr(socket, "EAI_ADDRFAMILY", -9))
FAMILIES = (socket.AF_INET, socket.AF_INET6)

Resolve = Callable[[str, socket.AddressFamily], Iterable[str]]


class NoAddresses(OSError):
    """The name does not exist or has no addresses."""


class DnsDiscovery:
    """Resolves the name every `interval_s`, and yields the set when it has changed."""

    source = "dns"

    def __init__(
        self,
        name: str,
        *,
        port: int,
        scheme: str,
        interval_s: float,
        loopback: bool = False,
        resolve: Resolve | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resolve(name, family)` returns addresses or raises OSError; it may block. With `loopback` a replica may be
        on this machine."""
        self._loopback = loopback
        self._name, self._port, self._scheme, self._interval_s = name, port, scheme, interval_s
        self._resolve = resolve or _getaddrinfo
        self._clock = clock
        self._found: frozenset[Replica] = frozenset()
        self._why = "not answered yet"
        self._good_s = clock()  # time of the last good answer
        self._errors = 0

    def status(self) -> Status:
        """The view's state; it is stale since the last good answer."""
        stale_s = self._clock() - self._good_s if self._why else 0.0
        return Status(not self._why, self._why, stale_s, self._errors, len(self._found))

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again at every change."""
        given: frozenset[Replica] | None = None
        while True:
            try:
                addresses = await self._ask()
            except OSError as error:
                self._failed(error.strerror or str(error) or "the name cannot be resolved")
            else:
                self._learn(addresses)
                if self._found != given:
                    given = self._found
                    yield given
            await asyncio.sleep(self._interval_s)

    async def _ask(self) -> list[str]:
        """Resolve the name, however long it takes. Raises OSError."""
        answer = _in_thread(lambda: _addresses(self._resolve, self._name, loopback=self._loopback))
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
            log.info("discovery is fresh", extra={"event": "discovery_fresh", "fields": fields})
        self._why = ""
        hosts = (f"[{address}]" if ":" in address else address for address in addresses)
        self._found = frozenset(Replica(f"{self._scheme}://{host}:{self._port}") for host in hosts)

    def _failed(self, why: str) -> None:
        """Flag the view; logged once per outage."""
        self._errors += 1
        if self._errors == 1 or not self._why:
            fields = {"source": self.source, "name": self._name, "why": why, "kept": len(self._found)}
            log.warning(
                "discovery is stale: the last good set is kept", extra={"event": "discovery_stale", "fields": fields}
            )
        self._why = why


def _addresses(resolve: Resolve, name: str, *, loopback: bool) -> list[str]:
    """The addresses of the first family that has any which a replica may have. Raises OSError, and NoAddresses if there
    are certainly none."""
    others: list[str] = []
    for family in FAMILIES:
        try:
            said = list(resolve(name, family))
        except socket.gaierror as error:
            if error.errno not in NOT_THERE:
                raise
            continue
        if addresses := sorted({each for each in said if usual(each, loopback=loopback)}):
            return addresses
        others += said
    if others:
        raise NoAddresses(f"{name} has no addresses but {others[0]}, where no replica may be (discovery.loopback)")
    raise NoAddresses(f"{name} has no addresses")


def _getaddrinfo(name: str, family: socket.AddressFamily) -> Iterable[str]:
    return [str(address[0]) for *_, address in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)]


def _in_thread(ask: Callable[[], list[str]]) -> asyncio.Future[list[str] | OSError]:
    """Run in a daemon thread. A failure is set as a result, since there may be no task left to catch it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str] | OSError] = loop.create_future()

    def settle(said: list[str] | OSError) -> None:
        if not answer.done():  # otherwise nobody waits any more
            answer.set_result(said)

    def run() -> None:
        said: list[str] | OSError
        try:
            said = ask()
        except OSError as error:
            said = error
        except Exception as error:  # for instance UnicodeError: not a name by the rules of IDNA
            said = OSError(str(error))
        with suppress(RuntimeError):  # the event loop has ended meanwhile
            loop.call_soon_threadsafe(settle, said)

    threading.Thread(target=run, name="dns", daemon=True).start()
    return answer
