"""The router's own pages: health, readiness, metrics, and the pages that an operator needs during an incident."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from router.admin.history.history_pages import HistoryPages
from router.admin.history.request_history import RouterHistory
from router.admin.page_table import TEXT, AdminRequest, AdminResponse, AdminRoute, get_route, json_answer
from router.admin.replica_rows import describe_breaker, explain_health
from router.core.disagg.bodies import ENGINE_ID_SEPARATOR
from router.core.fleet.member import ReplicaState
from router.core.placement.router import Router
from router.placement_api import MODELS, REQUESTS, HttpPage, RequestPrincipal, json_page, no_model_page
from router.telemetry.metrics import Metrics


class Pages:
    """Handlers that read and never change anything."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        *,
        ready: Callable[[], bool],
        clock: Callable[[], float],
        history: RouterHistory,
        streams: Callable[[str], dict[str, Any] | None] = lambda _: None,
        window: Callable[[str], int | None] = lambda _: None,
        added: Callable[[str], bool] = lambda _: False,
        warming: Callable[[str], bool] = lambda _: False,
        discoveries: Callable[[], dict[str, Any]] = dict,
        engine_version: Callable[[str], str] = lambda _: "",
        sharing: Callable[[], dict[str, Any] | None] = lambda: None,
        unshared: Callable[[], str] = str,
        state: Callable[[], dict[str, Any] | None] = lambda: None,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Functions that the pages read. The first five take a replica's id; `sharing` and `state` return None if the
        feature is off.

        `streams`: state of its event stream, or None.
        `window`: maximum of requests that it may have open.
        `added`: True if it was added at run time.
        `warming`: True if its cache is being filled.
        `engine_version`: version that its engine has reported.
        `discoveries`: freshness of each source's list.
        `sharing`: state of the link to other routers.
        `unshared`: reason for which routers share no state; empty: no such condition.
        `state`: state restored from before the start.
        `look`: reads again which models the replicas serve.
        """
        self._router = router
        self._metrics = metrics
        self._ready = ready
        self._clock = clock
        self._streams = streams
        self._window = window
        self._added = added
        self._warming = warming
        self._discoveries = discoveries
        self._engine_version = engine_version
        self._sharing, self._unshared, self._state, self._look = sharing, unshared, state, look
        self.decisions = history.recent
        self._past = HistoryPages(history)

    def routes(self) -> list[AdminRoute]:
        """Return the routes for the admin listener."""
        return [
            *(get_route(path, partial(self._serve_page, path)) for path in ("/healthz", "/readyz", "/metrics")),
            get_route("/admin/replicas", self.replicas),
            get_route("/admin/index", self.index),
            *self._past.routes(),
        ]

    async def page(self, path: str, owner: RequestPrincipal | None = None, accept: str = "") -> HttpPage | None:
        """Return a page that clients may see, by path; None if the path has no page.

        - `/healthz`: the process is alive.
        - `/readyz`: a replica may receive requests and the router is not draining.
        - `/v1/models`: the models of all ready replicas, in OpenAI's list form.
        - `/metrics`: metrics in the format that `accept`, the header, requests.
        - Below REQUESTS: the record of a request of the owner's.
        """
        if path == "/healthz":
            return HttpPage(200, TEXT, b"ok\n")
        if path == "/readyz":
            ready = self._ready()
            return HttpPage(200 if ready else 503, TEXT, b"ready\n" if ready else b"not ready\n")
        if path == "/metrics":
            return HttpPage(200, *await self._metrics.page_for(accept))
        if path == MODELS:
            return json_page({"object": "list", "data": list(self._models().values())})
        if path.startswith(MODELS + "/"):
            return await self._model(path.removeprefix(MODELS + "/"))
        if path.startswith(REQUESTS) and owner is not None:
            return await self._past.own_request(path, owner)
        return None

    async def _model(self, name: str) -> HttpPage:
        """Return the row of one model. If no replica is known to serve the name, the replicas' models are read again
        first."""
        if name and self._look is not None and name not in self._router.fleet.model_names():
            await self._look()
        row = self._models().get(name)
        return no_model_page(name) if row is None else json_page(row)

    async def _serve_page(self, path: str, call: AdminRequest) -> AdminResponse:
        page = await self.page(path, accept=call.header("Accept"))
        assert page is not None, path  # noqa: S101 - these are paths of `page`
        return AdminResponse(page.status, page.body, page.content_type)

    async def replicas(self, _: AdminRequest) -> AdminResponse:
        """Answer with every replica with health, load, grade and learned speeds, with the freshness of the list by
        source, and with the state of the link to other routers."""
        now_s = self._clock()
        pairs = self._router.disaggregator.pair_counts(now_s)
        rows = [self._replica(m, now_s) | {"split": self._split(m.id, pairs)} for m in self._router.members]
        sharing, unshared = self._sharing(), self._unshared()
        return json_answer(
            {"replicas": rows, "discovery": self._discoveries(), "sharing": sharing, "unshared": unshared}
        )

    async def index(self, _: AdminRequest) -> AdminResponse:
        """Answer with the size of the prefix index, and the part of it that was restored from before the start."""
        index = self._router.index
        members = self._router.members
        held = {m.id: {"blocks": index.blocks(m.id), "blocks_max": index.capacity(m.id)} for m in members}
        return json_answer(
            {
                "keys": index.keys,
                "bytes": index.bytes_used,
                "bytes_max": index.bytes_max,
                "replicas": held,
                "state": self._state(),
            }
        )

    def _models(self) -> dict[str, Any]:
        """Return a row for each model, as the first engine that serves it writes its own."""
        rows: dict[str, Any] = {}
        for member in self._router.fleet.ready():
            for model in member.models.values():
                if isinstance(rows.get(model.name), msgspec.Raw):
                    continue
                if model.row:
                    rows[model.name] = msgspec.Raw(model.row)
                if model.name in rows:
                    continue
                row: dict[str, Any] = {
                    "id": model.name,
                    "object": "model",
                    "created": model.created,
                    "owned_by": model.owned_by,
                }
                row |= {"root": model.root, "parent": model.parent, "max_model_len": model.max_model_len_tokens}
                rows[model.name] = row
        return rows

    def _replica(self, member: ReplicaState, now_s: float) -> dict[str, Any]:
        model = member.prefill_model
        return {
            "id": member.id,
            "name": member.replica.name,
            "node": member.replica.node,
            "instance": member.replica.instance,
            "version": self._engine_version(member.id),
            "added": self._added(member.id),
            "warming": self._warming(member.id),
            "ready": member.ready,
            "why": explain_health(member),
            "failures_in_a_row": member.breaker.failures,
            "breaker": describe_breaker(member, now_s),
            "grade": member.grade,
            "grade_why": self._router.knowledge.grade_of(member.id)[1],
            "events": self._events(member.id),
            "models": sorted(member.models),
            "in_flight": len(member.leases),
            "window": self._window(member.id),
            "unseen_answers": member.evidence.unobserved_responses,
            "pending_prefill_ms": round(member.queue.pending_ms(now_s), 1),
            "load": member.load,
            "metrics_of_several": member.counters.page_source.several,
            "share": round(member.counters.share, 3),
            "prefill": model,
            "decode_step": member.step_model,
            "answer_tokens": round(member.speeds.answer_tokens.mean, 1),
            "blocks": self._router.index.blocks(member.id),
            "blocks_max": self._router.index.capacity(member.id),
            "role": member.replica.role,
            "pull_address": self._router.pull_address(member.id),
        }

    def _split(self, replica: str, counts: dict[str, dict[str, int]]) -> dict[str, Any] | None:
        """Return the replica's KV connector for disaggregated prefill and its numbers of pairs, for prefill or for
        decode; None without a KV connector."""
        if (found := self._router.disaggregator.connector_of(replica)) is None:
            return None
        connector, address, answers = found
        return {
            "handshake": connector,
            "address": address.partition(ENGINE_ID_SEPARATOR)[0],
            "answers": answers,
            "pairs": counts.get(replica) or {"warm": 0, "new": 0, "resting": 0},
        }

    def _events(self, replica: str) -> dict[str, Any] | None:
        """Return the state of the replica's event stream and blocks; None if there is no stream."""
        knowledge = self._router.knowledge
        ledger, stream = knowledge.engine_blocks(replica), self._streams(replica)
        if ledger is None:
            return stream
        equal, compared = knowledge.checks(replica)
        return {
            **(stream or {}),
            "blocks": ledger.blocks,
            "block_tokens": ledger.block_tokens,
            "blocks_aside": ledger.aside,
            "unknown_removals": ledger.unknown_removals,
            "blocks_forgotten": ledger.forgotten,
            "hash_conflicts": ledger.conflicts,
            "blocks_of_other_size": ledger.other_size,
            "answers_compared": compared,
            "answers_equal": equal,
        }
