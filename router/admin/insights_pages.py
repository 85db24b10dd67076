"""Control plane of the observatory: the ledger of all requests, and its pages.

Templates are polled from the data planes (`watch`); ends of requests come from the control plane (`observe`). A page is
made in slices, between which requests are served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from router import __version__
from router.admin.decision_rows import fields_of
from router.admin.page_table import AdminRequest, AdminResponse, AdminRoute, get_route, json_answer
from router.admin.replica_rows import Peers, ReplicaRows
from router.config.api_keys import NONE
from router.config.schema import InsightsSettings
from router.core.estimators.token_ratio import BYTES_PER_TOKEN
from router.core.insights.ledger.advice import NOTHING
from router.core.insights.ledger.recent_traffic import TenantTraffic
from router.core.insights.ledger.template_tree import Views
from router.core.insights.ledger.timeline import STEP_S
from router.core.insights.ledger.totals import WINDOW_S, Ledger
from router.core.placement.router import Router
from router.core.types.cache_misses import FUNNEL_STAGES, Template
from router.core.types.disagg_types import Role
from router.telemetry.build import build

ADVICE_MAX = 50  # rows of the advice page
TOP_ADVICE_MAX = 5  # rows of advice in the overview
GROUPS_SHOWN_MAX = 50
MODELS_SHOWN_MAX = 50
RECENT_S = 120.0  # time for which a model without a ready replica is shown after a request for it
PAIRS_SHOWN_MAX = 100
TENANTS_SHOWN_MAX, TENANTS_READ_MAX = 20, 1_000
DECISIONS_MAX = 20
DIFFERENCES_MAX = 16  # differences shown per template
SLICE_ROWS = 25  # rows made without a break: about half a millisecond
LINKED = frozenset({"/metrics", "/runbook", "/admin/series", "/admin/decisions"})  # pages that the dashboard requests
ASK_S = 2.0  # interval at which data planes are polled for templates

Rows = list[dict[str, Any]]
T = TypeVar("T")
R = TypeVar("R")


class InsightsService:
    """Observatory of one router. `observe` is on the path of every request."""

    def __init__(
        self,
        router: Router,
        settings: InsightsSettings,
        *,
        tenant: Callable[[str], str],
        clock: Callable[[], float],
        decisions: Callable[[int], list[Callable[[], dict[str, Any]]]],
        window: Callable[[str], int | None] = lambda _: None,
        warming: Callable[[str], bool] = lambda _: False,
        grade_falls: Callable[[str], int] = lambda _: 0,
        models: Callable[[int], Rows] = lambda _: [],
        tenants: Callable[[], dict[str, tuple[int, int]]] = dict,
        unready_at_s: Mapping[str, float] = MappingProxyType({}),
        counted: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        about_router: Callable[[], dict[str, Any]] = dict,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Functions that the pages read:

        `tenant(name)`: the label under which a tenant is shown.
        `decisions(n)`: rows of the last n requests, newest first.
        `window(replica)`: maximum of requests that the replica may have open.
        `warming(replica)`: True if its cache is being filled.
        `grade_falls(replica)`: number of times that its grade fell in the last minutes.
        `models(n)`: rows of n models.
        `tenants()`: requests in flight and waiting of each tenant, by its label.
        `unready_at_s`: model -> Unix time of its last request that no replica could take.
        `counted()`: prompt tokens of answers without a cached-token count that the engines' own counters cover, and how
        many of them were cached.
        `about_router()`: this router's name, its peers, and the reason if routers share no state.
        `wall_clock()`: the clock of requests' times.
        """
        self._router = router
        self._excerpts = settings.excerpts
        self._build = str(build())
        self._links = {"grafana": settings.grafana_url} if settings.grafana_url else {}
        self._clock, self._wall_clock = clock, wall_clock
        self._decisions = decisions
        self._rows = ReplicaRows(
            router.index,
            clock=clock,
            is_known=lambda replica: router.fleet.member(replica) is not None,
            grade_why=lambda replica: router.knowledge.grade_of(replica)[1],
            window=window,
            warming=warming,
            grade_falls=grade_falls,
        )
        self._began_s, self._unready_at_s = wall_clock(), unready_at_s
        self._models, self._tenants, self._counted, self._about_router = models, tenants, counted, about_router
        self.ledger = Ledger(
            templates_max=settings.templates_max,
            groups_max=settings.groups_max,
            steps_max=settings.steps_max,
            excerpts=settings.excerpts,
            tenant=tenant,
            now_s=self._began_s,
        )
        self.observe = self.ledger.observe  # bound directly: one call less per request

    def register_templates(self, templates: Iterable[Template]) -> None:
        """Add templates that a data plane has seen. Their labels are text of prompts, and dropped without
        `excerpts`."""
        if not self._excerpts:
            templates = [msgspec.structs.replace(each, label="") if each.label else each for each in templates]
        self.ledger.know(templates)

    async def watch(self, templates: Callable[[], Iterable[Template]]) -> None:
        """Poll the data planes for templates (`placement_api.Frontends.templates`) until cancelled."""
        while True:
            await asyncio.sleep(ASK_S)
            self.register_templates(templates())

    def hottest(self, count: int) -> list[Template]:
        """Return the most used templates that have a request which can be sent."""
        self._settle()
        return self.ledger.branches.hottest(count)

    def flush(self) -> Ledger:
        """Return the ledger, with all sums up to now."""
        self._settle()
        return self.ledger

    # -- pages ---------------------------------------------------------------------------------------------------

    def routes(self) -> list[AdminRoute]:
        """Return the routes for the admin listener."""
        return [
            get_route("/admin/observatory", self.overview),
            get_route("/admin/templates", self.templates),
            get_route("/admin/advice", self.advice),
        ]

    async def overview(self, call: AdminRequest) -> AdminResponse:
        """Answer with all data of the dashboard, except series over time and searches, which have separate pages.
        `pages` lists the pages that this listener has."""
        now_s = self._settle()
        ledger = self.ledger
        page: dict[str, Any] = {
            "now_s": round(now_s, 3),
            "pages": sorted(call.paths & LINKED),
            "links": self._links,
            "version": __version__,
            "build": self._build,
            "router": self._about_router(),
            "uptime_s": round(now_s - self._began_s, 1),
            "excerpts": self._excerpts,
            "totals": {**ledger.totals_row(), **self._counted_row()},
            "timeline": {"step_s": STEP_S, "points": ledger.timeline.points()},
            "stages": FUNNEL_STAGES,
        }
        await asyncio.sleep(0)
        page["replicas"] = await self._replicas()
        page["split"] = self._split()
        await asyncio.sleep(0)
        views = self._views()
        drawn, others = views.group_for_map()
        await asyncio.sleep(0)
        page["map"] = await _in_slices(drawn, views.branch)
        page["map"] += await _in_slices(others, lambda group: views.build_others_row(*group), 1)
        page["advice"] = self._advice(TOP_ADVICE_MAX)
        page["no_advice"] = f"{NOTHING} was lost for an avoidable reason."
        await asyncio.sleep(0)
        page["models"] = self._models(MODELS_SHOWN_MAX)
        page["unserved_models"] = self._unserved_rows(now_s)
        page["groups"] = ledger.groups.rows(GROUPS_SHOWN_MAX)
        page["tenants"] = self._tenant_rows()
        await asyncio.sleep(0)
        page["decisions"] = await _in_slices(self._decisions(DECISIONS_MAX), lambda decision: decision(), 1)
        return json_answer(page)

    def _tenant_rows(self) -> Rows:
        """Return rows of the tenants with the largest parts of the recently computed tokens or of the current requests,
        those with the most computed tokens first."""
        now = self._tenants()
        all_ = sum(in_flight for in_flight, _ in now.values()) or 1
        found = {label: TenantTraffic(label) for label, (in_flight, _) in now.items() if in_flight}
        found |= {each.tenant: each for each in self.ledger.traffic.tenants(TENANTS_READ_MAX)}
        rows = [
            {**each._asdict(), **dict(zip(("in_flight", "waiting"), now.get(label, (0, 0)), strict=True))}
            for label, each in found.items()
        ]
        rows.sort(key=lambda row: -max(row["computed_share"], row["in_flight"] / all_))
        return sorted(rows[:TENANTS_SHOWN_MAX], key=lambda row: -row["computed_share"])

    def _unserved_rows(self, now_s: float) -> Rows:
        """Return models that were requested within RECENT_S and have no ready replica, the last requested one first."""
        router, models = self._router, self._router.models
        at_s = sorted(self._unready_at_s.items(), key=lambda each: -each[1])
        names = [name for name, last_s in at_s if last_s > now_s - RECENT_S and models.find_known_name(name) == name]
        rows = [name for name in names if not router.fleet.list_serving(name)][:MODELS_SHOWN_MAX]
        return [{"model": name, "why": models.readiness_summary(name)} for name in rows]

    def _counted_row(self) -> dict[str, int]:
        tokens, hits = self._counted()
        return {"counted_tokens": round(tokens), "counted_hit_tokens": round(hits)}

    async def templates(self, _: AdminRequest) -> AdminResponse:
        """Answer with templates, most used first, and the differences found in each."""
        self._settle()
        views = self._views()
        differences = self.ledger.losses.make_row_lookup(self.ledger.fading.weight, DIFFERENCES_MAX)
        await asyncio.sleep(0)
        return json_answer(
            {"templates": await _in_slices(views.most, lambda id_: views.template(id_, differences(id_)))}
        )

    async def advice(self, _: AdminRequest) -> AdminResponse:
        """Answer with advice against misses, the most costly first."""
        self._settle()
        return json_answer({"window_s": int(WINDOW_S), "advice": self._advice(ADVICE_MAX)})

    def _settle(self) -> float:
        now_s = self._wall_clock()
        self.ledger.settle(now_s)
        return now_s

    def _views(self) -> Views:
        return Views(
            self.ledger.branches,
            self.ledger.fading.weight,
            bytes_per_token=self._bytes_per_token,
            holders=self._router.index.holders_of,
        )

    def _bytes_per_token(self, model: str) -> float:
        """Return the learned bytes per token of this model, or of any served model if this one has no value."""
        if not self._router.fleet.list_serving(model):
            model = min(self._router.fleet.model_names(), default="")
        return self._router.models.tokens(model).bytes_per_token if model else BYTES_PER_TOKEN

    def _advice(self, rows_max: int) -> Rows:
        model = self._router.fleet.prefill_model()
        rows = self.ledger.advice(
            rows_max,
            ms_per_token=lambda context: model.per_token_ms + model.per_token_context_ms * context,
            kv_tokens=sum(member.load.kv_tokens_max or 0 for member in self._router.fleet.ready()),
        )
        for row in rows:
            row["tenants"] = [each for each in row["tenants"] if each not in ("", NONE)]
        return rows

    def _split(self) -> dict[str, Any] | None:
        """Return the replicas with a KV connector for disaggregated prefill, those that prefill first, and their pairs;
        None without such a replica."""
        router, now_s = self._router, self._clock()
        counts, rows = router.disaggregator.pair_counts(now_s), Rows()
        for member in router.members:
            if (found := router.disaggregator.connector_of(member.id)) is not None:
                connector, _, answers = found
                row = {"id": member.id, "role": member.replica.role, "handshake": connector, "answers": answers}
                rows.append({**row, "pairs": counts.get(member.id) or {"warm": 0, "new": 0, "resting": 0}})
        if not rows:
            return None
        rows.sort(key=lambda row: row["role"] is Role.DECODE)
        pairs, in_all = router.disaggregator.list_pairs(PAIRS_SHOWN_MAX, now_s)
        shown = [{**fields_of(pair), "rests_s": round(pair.rests_s, 1)} for pair in pairs]
        return {"replicas": rows, "pairs": shown, "pairs_in_all": in_all}

    async def _replicas(self) -> Rows:
        """Return the rows of all replicas (replica_rows.py)."""
        members, traffic = self._router.members, self.ledger.traffic
        requests = traffic.requests
        read = await _in_slices(members, lambda member: traffic.of_replica(member.id, requests))
        of_members = dict(zip((member.id for member in members), read, strict=True))
        peers = Peers(members, of_members)
        await asyncio.sleep(0)
        return await _in_slices(members, lambda member: self._rows.row(member, of_members[member.id], peers))


async def _in_slices(what: Sequence[T], row: Callable[[T], R], slice_rows: int = SLICE_ROWS) -> list[R]:
    rows = list[R]()
    for at in range(0, len(what), slice_rows):
        rows += [row(each) for each in what[at : at + slice_rows]]
        await asyncio.sleep(0)
    return rows
