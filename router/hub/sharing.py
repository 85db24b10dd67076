"""The hub's link to other routers, where the settings name a store that they share.

There is one for all edges and workers: workers ask the hub, and the hub shares. Everything that needs the client of
Redis is imported here, when there is something to share.
"""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import randbits
from typing import Any, Protocol

from router.core.placement.router import Router
from router.core.sharing.limits import SharingLimits
from router.core.sharing.sharing import Sharing
from router.hub.admitter import Admitter
from router.hub.local_placer import LocalPlacer
from router.hub.warm_start import WarmStart
from router.settings import secrets
from router.settings.keys import Keys
from router.settings.schema import AuthSettings, Settings
from router.sharing.addresses import BadAddress, StoreAddress
from router.sharing.checks import address_of
from router.sharing.link import LinkLimits, SharingLink
from router.sharing.seals import Seals, secret_of_keys
from router.sharing.session import Session, StoreFailed
from router.sharing.shared import SharedThings
from router.telemetry.metrics.figures import SharingFigures

_UNREADABLE = (BadAddress, OSError, UnicodeDecodeError)  # why there is no address
OWNER_WAIT_S = 0.25  # longest time in which other routers' words on a stored response are still to be expected


class LinkedHub(Protocol):
    """The parts of a hub that its link needs. HubParts has the link among its own, so it is not named here."""

    settings: Settings
    router: Router
    admission: Admitter
    placer: LocalPlacer
    state: WarmStart | None

    @property
    def keys(self) -> Keys | None:
        """API keys in force; None if the router asks for none."""


class RouterLink:
    """The link of one hub, and what pages and metrics say of it."""

    def __init__(self, hub: LinkedHub, admin_port: int) -> None:
        self._hub = hub
        shared = hub.settings.shared
        # Address of the store that the present session is with, or is to be with; None: no session has begun.
        self._address: StoreAddress | None = None
        self.name = shared.router or f"{socket.gethostname()}:{admin_port}"
        origin = time.time_ns() & ~0xFFF | randbits(12)  # higher for each later process of one name
        limits = SharingLimits()
        self._core = Sharing(
            hub.router, self.name, origin, limits, lambda: self.link.urgent(), lambda: self.link.changed()
        )
        self.things = SharedThings(
            hub.admission.quotas,
            hub.router,
            hub.placer.owners,
            routers_assumed=shared.routers_assumed,
            served=hub.router.base_models,
            clock=time.monotonic,
        )
        self._secrets = _secrets(hub.settings.auth)
        self._seals = Seals(shared.name, self._secrets or _secrets_of(hub.keys), time.monotonic)
        self.link = SharingLink(
            self._opened,
            self._core,
            self.things,
            name=self.name,
            origin=origin,
            limits=LinkLimits(hub.settings.limits.response_ids_max, limits.peers_max, shared.replicas_in_common),
            seals=self._seals,
            state=hub.state if hub.settings.state.siblings else None,
        )
        if hub.state is not None and hub.settings.state.siblings:
            hub.state.expect(more=True)

    def start(self) -> None:
        """Begin to hear others, in the background."""
        self.link.start()

    async def close(self) -> None:
        """Tell others that this router leaves."""
        await self.link.close()

    def told_within_s(self) -> float:
        """How long another router's word on a stored response may take to come; 0 where none is heard."""
        return OWNER_WAIT_S if self.link.whole and self.link.routers > 1 else 0.0

    def take_keys(self, keys: Keys | None) -> None:
        """Other API keys are in force: tenants, and the secret where it is made of the keys, may be other ones."""
        self.things.tenants.configured()
        if not self._secrets and self._seals.renew(_secrets_of(keys)):
            self.link.resealed()

    def reload(self) -> None:
        """Go to where the store is by the settings in force; if that is where it was, nothing is interrupted."""
        try:
            address = address_of(self._hub.settings.shared)
        except _UNREADABLE:  # a file that has changed since it was checked: the next session says so
            return
        if self._address is not None and address != self._address:
            self.link.reopen()

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Session]:
        """A session by the settings in force, with the contents of their files that were last accepted. Raises
        StoreFailed."""
        # An extra: imported where there is something to share.
        from router.sharing.clients import TlsFiles
        from router.sharing.store import opened

        shared, self._address = self._hub.settings.shared, None
        try:
            self._address = address = address_of(shared)
        except _UNREADABLE as error:
            raise StoreFailed("unreachable", f"the store's address cannot be read: {error}") from error
        tls = TlsFiles(shared.tls_ca, shared.tls_certificate, shared.tls_key)
        async with opened(address, shared.name, shared.timeout_s, tls) as session:
            yield session

    # -- what is said of it ------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `/admin/replicas` says of it."""
        link = self.link
        delay_ms = None if link.delay_s is None else round(link.delay_s * 1e3, 2)
        return {
            "router": self.name,
            "fleet": self._hub.settings.shared.name,
            "whole": link.whole,
            "why": "" if link.whole else link.why,  # a session may fail, and another be open before anybody is alone
            "refused": link.refusal,
            "delay_ms": delay_ms,
            "routers": [{"name": name, "age_s": round(age_s, 3)} for name, age_s in link.peers()],
            "authenticated": bool(self._seals),
            "strangers": link.strangers(),
        }

    def figures(self) -> SharingFigures:
        """What metrics say of it."""
        link = self.link
        return SharingFigures(
            whole=link.whole,
            routers=link.routers,
            strangers=len(link.strangers()),
            writable=link.whole and not link.refusal,
            delay_s=link.delay_s if link.whole else None,
            counts=link.counts,
            failures=link.failures,
        )


def _secrets(auth: AuthSettings) -> list[bytes]:
    """The secrets that the settings give, the one in force first. Raises OSError and UnicodeDecodeError."""
    secret = secrets.read(auth.secret, auth.secret_file)
    before = secrets.read(auth.secret_before, auth.secret_before_file)
    return [each.encode() for each in (secret, before) if secret and each]


def _secrets_of(keys: Keys | None) -> list[bytes]:
    """The secret of a router whose settings give none."""
    return [secret_of_keys(keys.digests)] if keys is not None else []
