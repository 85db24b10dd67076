"""Interface between the control plane and its parts. `wiring` makes the parts, `control_plane` holds them."""

from __future__ import annotations

import ssl
from typing import Protocol

from router.admin.history.request_history import RouterHistory
from router.admin.insights_pages import InsightsService
from router.admin.listener import AdminListener
from router.admin.pages import Pages
from router.config.api_keys import Keys
from router.config.schema import Settings
from router.control.admission_controller import AdmissionController
from router.control.local_placement import LocalPlacementService
from router.control.peer_routers import PeerSync
from router.control.replica_lifecycle import ReplicaLifecycle
from router.control.snapshot import SnapshotManager
from router.control.unshared import UnsharedRouters
from router.core.placement.router import Router
from router.engines.discovery.combined_source import MergedDiscovery
from router.engines.discovery.static import StaticDiscovery
from router.engines.kv_events.subscriber import EventStreamManager
from router.engines.metrics_page import MetricsPages
from router.engines.probe import Prober
from router.placement_api import Frontends
from router.prewarm.warmer import Warmer
from router.telemetry.metrics import Metrics
from router.telemetry.process_totals import ProcessTotals
from router.telemetry.request_record import RequestRecord
from router.tokenization.encoder import PromptEncoder


class ControlPlaneContext(Protocol):
    """A control plane, as its parts use it. A part that is None is switched off."""

    settings: Settings
    admin: AdminListener
    admin_url: str
    admin_token: str
    upstream_key: str
    tls: ssl.SSLContext | None
    frontends: Frontends
    router: Router
    metrics: Metrics
    totals: ProcessTotals
    replicas: StaticDiscovery
    discoveries: MergedDiscovery
    history: RouterHistory
    pages: Pages
    observatory: InsightsService | None
    admission: AdmissionController
    warmer: Warmer
    events: EventStreamManager | None
    metrics_pages: MetricsPages
    lifecycle: ReplicaLifecycle
    prober: Prober
    prompts: PromptEncoder | None
    placer: LocalPlacementService
    link: PeerSync | None
    state: SnapshotManager | None
    unshared: UnsharedRouters | None

    @property
    def keys(self) -> Keys | None:
        """API keys in force; None if the router requires no keys."""

    def ready(self) -> bool:
        """True if requests should be sent to this router."""

    def observe(self, record: RequestRecord) -> None:
        """Count a request that ended."""

    def count_attempt_failure(self, replica: str, kind: str) -> None:
        """Count an attempt that failed."""
