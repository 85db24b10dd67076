"""Interface between a hub and its parts. `assembly` makes the parts, `hub` holds them."""

from __future__ import annotations

import ssl
from typing import Protocol

from router.admin.history.history import RouterHistory
from router.admin.listener import AdminListener
from router.admin.observatory import Observatory
from router.admin.pages import Pages
from router.core.placement.router import Router
from router.engines.discovery.static import StaticDiscovery
from router.engines.discovery.together import Together
from router.engines.kv_events.subscriber import Subscriber
from router.engines.metrics_page import MetricsPages
from router.engines.probe import Prober
from router.hub.admitter import Admitter
from router.hub.local_placer import LocalPlacer
from router.hub.roster import ReplicaRoster
from router.hub.sharing import RouterLink
from router.hub.warm_start import WarmStart
from router.placer import Edges
from router.prewarm.warmer import Warmer
from router.settings.keys import Keys
from router.settings.schema import Settings
from router.telemetry.metrics import Metrics
from router.telemetry.process_counts import Totals
from router.telemetry.record import RequestRecord
from router.tokens.encoder import Prompts


class HubParts(Protocol):
    """A hub, as its parts use it. A part that is None is switched off."""

    settings: Settings
    admin: AdminListener
    admin_url: str
    admin_token: str
    upstream_key: str
    tls: ssl.SSLContext | None
    edges: Edges
    router: Router
    metrics: Metrics
    totals: Totals
    replicas: StaticDiscovery
    discoveries: Together
    history: RouterHistory
    pages: Pages
    observatory: Observatory | None
    admission: Admitter
    warmer: Warmer
    events: Subscriber | None
    metrics_pages: MetricsPages
    roster: ReplicaRoster
    prober: Prober
    prompts: Prompts | None
    placer: LocalPlacer
    link: RouterLink | None
    state: WarmStart | None

    @property
    def keys(self) -> Keys | None:
        """API keys in force; None if the router requires no keys."""

    def ready(self) -> bool:
        """True if requests should be sent to this router."""

    def observe(self, record: RequestRecord) -> None:
        """Count a request that ended."""

    def failed(self, replica: str, kind: str) -> None:
        """Count an attempt that failed."""
