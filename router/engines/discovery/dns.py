"""Replicas from DNS: all addresses of a headless Service's name, for a router without access to the API server.

The machine's resolver is used (getaddrinfo), the same as in every other program in a pod. Hosts file, search domains
and `ndots` therefore apply, and no library must implement them. The call blocks, for up to half a minute if no name
server answers. Each call therefore has its own thread, and there are never two at once. It is a daemon thread, which
delays neither the work of other threads nor the exit of the process.

DNS has little information. It does not report pods that restart or terminate, nor the time at which an answer changes.
A Service's records contain only the ready pods, as old as the answer's time to live. Therefore:

- A missing answer, or a failure, changes no replica: the last good set is kept, and flagged as stale.
- A name without addresses changes no replica either. A Service scaled to zero looks the same as a name server that has
  just lost its zone, and probes detect dead replicas anyway.
- If a name has addresses of both families, only IPv4 counts. Pods of a dual-stack Service have one of each. They would
  be two replicas each, with half of the information about one cache.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress

from router.config.allowed_networks import is_public
from router.core.types.replicas import Replica
from router.engines.discovery import Status

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # time after which the view is flagged as stale, while the call continues
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
        self._why = "not resolved yet"
        self._good_s = clock()  # time of the last good answer
        self._errors = 0

    def status(self) -> Status:
        """Return the view's state. It is stale since the last good answer."""
        stale_s = self._clock() - self._good_s if self._why else 0.0
        return Status(not self._why, self._why, stale_s, self._errors, len(self._found))

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again at every change."""
        given: frozenset[Replica] | None = None
        while True:
            try:
                addresses = await self._ask()
            except OSError as error:
                self._mark_stale(error.strerror or str(error) or "the name cannot be resolved")
            else:
                self._learn(addresses)
                if self._found != given:
                    given = self._found
                    yield given
            await asyncio.sleep(self._interval_s)

    async def _ask(self) -> list[str]:
        """Resolve the name, without a time limit. Raises OSError."""
        answer = _in_thread(lambda: _addresses(self._resolve, self._name, loopback=self._loopback))
        await asyncio.wait({answer}, timeout=ANSWER_S)
        if not answer.done():
            self._mark_stale(f"no answer for {ANSWER_S:.0f} s")
        said = await answer
        if isinstance(said, OSError):
            raise said
        return said

    def _learn(self, addresses: list[str]) -> None:
        self._good_s = self._clock()
        if self._why:
            fields = {"source": self.source, "name": self._name, "replicas": len(addresses)}
            log.info("discovery is current", extra={"event": "discovery_fresh", "fields": fields})
        self._why = ""
        hosts = (f"[{address}]" if ":" in address else address for address in addresses)
        self._found = frozenset(Replica(f"{self._scheme}://{host}:{self._port}") for host in hosts)

    def _mark_stale(self, why: str) -> None:
        """Flag the view as stale. Logged once per outage."""
        self._errors += 1
        if self._errors == 1 or not self._why:
            fields = {"source": self.source, "name": self._name, "why": why, "kept": len(self._found)}
            log.warning(
                "discovery is stale: the last valid list is used", extra={"event": "discovery_stale", "fields": fields}
            )
        self._why = why


def _addresses(resolve: Resolve, name: str, *, loopback: bool) -> list[str]:
    """Return the usable addresses of the first family that has any. Raises OSError; NoAddresses if it is certain that
    there are no usable ones."""
    others: list[str] = []
    for family in FAMILIES:
        try:
            said = list(resolve(name, family))
        except socket.gaierror as error:
            if error.errno not in NOT_THERE:
                raise
            continue
        if addresses := sorted({each for each in said if is_public(each, loopback=loopback)}):
            return addresses
        others += said
    if others:
        raise NoAddresses(
            f"{name} has no usable addresses: {others[0]} is not allowed for replicas (discovery.loopback)"
        )
    raise NoAddresses(f"{name} has no addresses")


def _getaddrinfo(name: str, family: socket.AddressFamily) -> Iterable[str]:
    return [str(address[0]) for *_, address in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)]


def _in_thread(ask: Callable[[], list[str]]) -> asyncio.Future[list[str] | OSError]:
    """Run in a daemon thread. A failure is set as a result, because there may be no task left to catch it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str] | OSError] = loop.create_future()

    def settle(said: list[str] | OSError) -> None:
        if not answer.done():  # otherwise the waiting task has ended
            answer.set_result(said)

    def run() -> None:
        said: list[str] | OSError
        try:
            said = ask()
        except OSError as error:
            said = error
        except Exception as error:  # for instance UnicodeError: not a valid name under the rules of IDNA
            said = OSError(str(error))
        with suppress(RuntimeError):  # the event loop has ended in the meantime
            loop.call_soon_threadsafe(settle, said)

    threading.Thread(target=run, name="dns", daemon=True).start()
    return answer
