"""Link of the control plane to other routers, if the settings name a store that they share.

One link serves all frontends. Modules that need the Redis client are imported in this module, and only if there is
something to share.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import randbits
from typing import Any, Protocol

from router.config import secrets
from router.config.api_keys import Keys
from router.config.schema import AuthSettings, Settings
from router.control.admission_controller import AdmissionController
from router.control.local_placement import LocalPlacementService
from router.control.snapshot import SnapshotManager
from router.control.unshared import router_name
from router.core.peer_sync.sync import PeerSyncCore
from router.core.placement.router import Router
from router.peering.message_auth import Seals, secret_of_keys
from router.peering.peer_link import LinkLimits, PeerChannel
from router.peering.session import Session, StoreFailed
from router.peering.shared_state import SharedState
from router.peering.store_url import BadAddress, StoreAddress
from router.peering.validation import address_of
from router.telemetry.metrics.samples import PeeringMetrics

_UNREADABLE = (BadAddress, OSError, UnicodeDecodeError)  # reasons for a missing address
ROUTERS_ASSUMED = 2  # without `peering.expected_routers`
OWNER_WAIT_S = 0.25  # longest time in which other routers' reports of a stored response can still be expected


class PeeredControlPlane(Protocol):
    """The parts of a control plane that its link needs. `control_plane` imports this module, so its class is not named
    here."""

    settings: Settings
    router: Router
    admission: AdmissionController
    placer: LocalPlacementService
    state: SnapshotManager | None

    @property
    def keys(self) -> Keys | None:
        """API keys in force; None if the router requires no keys."""


class PeerSync:
    """Link of one control plane, with its status for pages and metrics."""

    def __init__(self, control: PeeredControlPlane, admin_port: int) -> None:
        self._control = control
        shared = control.settings.peering
        # Address of the store of the present session, or of the session that is being opened; None: no session has
        # begun.
        self._address: StoreAddress | None = None
        self.name = router_name(shared, admin_port)
        origin = time.time_ns() & ~0xFFF | randbits(12)  # higher for each later process of one name
        self._core = PeerSyncCore(
            control.router, self.name, urgent=lambda: self.link.urgent(), changed=lambda: self.link.changed()
        )
        self.shared_state = SharedState(
            control.admission.quotas,
            control.router.fitness,
            control.placer.owners,
            routers_assumed=shared.expected_routers or ROUTERS_ASSUMED,
            served=control.router.fleet.base_models,
            clock=time.monotonic,
        )
        self._secrets = _secrets(control.settings.auth)
        self._seals = Seals(shared.fleet, self._secrets or _secrets_of(control.keys), time.monotonic)
        self.link = PeerChannel(
            self._open_session,
            self._core,
            self.shared_state,
            name=self.name,
            origin=origin,
            limits=LinkLimits(control.settings.limits.response_ids_max, replicas_in_common=shared.replicas_in_common),
            seals=self._seals,
            state=control.state if control.settings.snapshot.from_peers else None,
        )
        if control.state is not None and control.settings.snapshot.from_peers:
            control.state.set_expected(more=True)

    def start(self) -> None:
        """Start to receive from other routers, in the background."""
        self.link.start()

    async def close(self) -> None:
        """Notify other routers that this router leaves."""
        await self.link.close()

    def publish_response_owner(self, response_id: str, replica: str, tenant: str) -> None:
        """Report a stored response to other routers."""
        self.link.publish_response_owner(response_id, replica, tenant)

    def owner_wait_s(self) -> float:
        """Return the time that another router's report of a stored response may take to arrive; 0 if none can
        arrive."""
        return OWNER_WAIT_S if self.link.connected and self.link.routers > 1 else 0.0

    def take_keys(self, keys: Keys | None) -> None:
        """Apply other API keys. The tenants may have changed, and also the secret if it is made of the keys."""
        self.shared_state.tenants.apply_tenants()
        if not self._secrets and self._seals.renew(_secrets_of(keys)):
            self.link.on_secrets_changed()

    def reload(self) -> None:
        """Connect to the store of the settings in force. If its address is unchanged, the session is not
        interrupted."""
        try:
            address = address_of(self._control.settings.peering)
        except _UNREADABLE:  # a file that has changed since it was checked: the next session reports that
            return
        if self._address is not None and address != self._address:
            self.link.reopen()

    @asynccontextmanager
    async def _open_session(self) -> AsyncIterator[Session]:
        """Open a session by the settings in force, with the contents of their files that were last accepted. Raises
        StoreFailed."""
        # An optional dependency: imported only if there is something to share.
        from router.peering.clients import TlsFiles
        from router.peering.redis_store import open_session

        shared, self._address = self._control.settings.peering, None
        try:
            self._address = address = address_of(shared)
        except _UNREADABLE as error:
            raise StoreFailed("unreachable", f"the address of the store is invalid: {error}") from error
        tls = TlsFiles(shared.tls_ca, shared.tls_certificate, shared.tls_key)
        async with open_session(address, shared.fleet, shared.timeout_s, tls) as session:
            yield session

    # -- status ------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the status for `/admin/replicas`."""
        link = self.link
        delay_ms = None if link.delay_s is None else round(link.delay_s * 1e3, 2)
        return {
            "router": self.name,
            "fleet": self._control.settings.peering.fleet,
            "whole": link.connected,
            # a session may fail, and the next be open before the link counts as down
            "why": "" if link.connected else link.why,
            "refused": link.refusal,
            "delay_ms": delay_ms,
            "routers": [{"name": name, "age_s": round(age_s, 3)} for name, age_s in link.peers()],
            "authenticated": bool(self._seals),
            "strangers": link.strangers(),
        }

    def figures(self) -> PeeringMetrics:
        """Return the figures for metrics."""
        link = self.link
        return PeeringMetrics(
            whole=link.connected,
            routers=link.routers,
            strangers=len(link.strangers()),
            writable=link.connected and not link.refusal,
            delay_s=link.delay_s if link.connected else None,
            counts=link.counts,
            failures=link.failures,
        )


def _secrets(auth: AuthSettings) -> list[bytes]:
    """Return the configured secrets, the one in force first. Raises OSError and UnicodeDecodeError."""
    secret = secrets.read(auth.secret, auth.secret_file)
    before = secrets.read(auth.secret_before, auth.secret_before_file)
    return [each.encode() for each in (secret, before) if secret and each]


def _secrets_of(keys: Keys | None) -> list[bytes]:
    """Derive the secret from the API keys, if the settings have none."""
    return [secret_of_keys(keys.digests)] if keys is not None else []
