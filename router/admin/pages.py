"""The router's own pages: health, readiness, metrics, and what an operator wants to see at three in the morning."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

import msgspec
from aiohttp import web

from router.core.facts.misses import Difference
from router.core.facts.placements import Candidate
from router.core.fleet.breaker import State
from router.core.fleet.member import Member
from router.core.placement.router import Router
from router.placer import JSON, MODELS, Page, json_page, no_model_page
from router.telemetry.metrics import CONTENT_TYPE, Metrics
from router.telemetry.record import RequestRecord

TEXT = "text/plain; charset=utf-8"


class Pages:
    """Handlers that read and never change anything."""

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        *,
        ready: Callable[[], bool],
        clock: Callable[[], float],
        decisions_max: int,
        streams: Callable[[str], dict[str, Any] | None] = lambda _: None,
        window: Callable[[str], int | None] = lambda _: None,
        added: Callable[[str], bool] = lambda _: False,
        warming: Callable[[str], bool] = lambda _: False,
        discoveries: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Given a replica's id, `streams` returns the state of its event stream or None, `window` how many requests it
        may have open, `added` whether it was added at run time, `warming` whether its cache is being filled.
        `discoveries` gives how fresh each source's list is."""
        self._router = router
        self._metrics = metrics
        self._ready = ready
        self._clock = clock
        self._streams = streams
        self._window = window
        self._added = added
        self._warming = warming
        self._discoveries = discoveries
        self.decisions: deque[RequestRecord] = deque(maxlen=decisions_max)

    def routes(self) -> list[web.RouteDef]:
        """Routes for the admin listener."""
        return [
            *(web.get(path, self._shown) for path in ("/healthz", "/readyz", "/metrics")),
            web.get("/admin/replicas", self.replicas),
            web.get("/admin/decisions", self.last_decisions),
            web.get("/admin/index", self.index),
        ]

    async def page(self, path: str) -> Page | None:
        """A page that clients may see, by path; None if there is none. `/healthz`: the process is alive. `/readyz`: at
        least one replica is ready and the router is not draining. `/v1/models`: the models of all ready replicas, in
        OpenAI's list form."""
        if path == "/healthz":
            return Page(200, TEXT, b"ok\n")
        if path == "/readyz":
            ready = self._ready()
            return Page(200 if ready else 503, TEXT, b"ready\n" if ready else b"not ready\n")
        if path == "/metrics":
            return Page(200, CONTENT_TYPE, await self._metrics.page_in_slices())
        if path == MODELS:
            return json_page({"object": "list", "data": list(self._models().values())})
        if path.startswith(MODELS + "/"):
            return self._model(path.removeprefix(MODELS + "/"))
        return None

    def _model(self, name: str) -> Page:
        row = self._models().get(name)
        return no_model_page(name) if row is None else json_page(row)

    async def _shown(self, request: web.Request) -> web.Response:
        page = await self.page(request.path)
        if page is None:
            raise web.HTTPNotFound
        return web.Response(status=page.status, body=page.body, headers={"Content-Type": page.content_type})

    async def replicas(self, _: web.Request) -> web.Response:
        """Every replica with health, load, grade and learned speeds, and how fresh the list is, by source."""
        now_s = self._clock()
        rows = [self._replica(m, now_s) for m in self._router.members]
        return _json({"replicas": rows, "discovery": self._discoveries()})

    async def last_decisions(self, _: web.Request) -> web.Response:
        """The last requests, newest first, each with its most telling candidates and the number of all candidates."""
        return _json({"decisions": [_decision(record) for record in reversed(self.decisions)]})

    def newest(self, count: int) -> list[Callable[[], dict[str, Any]]]:
        """Rows of the last `count` requests, each made when it is called."""
        return [partial(_decision, record) for record in islice(reversed(self.decisions), count)]

    async def index(self, _: web.Request) -> web.Response:
        """Size of the prefix index."""
        index = self._router.index
        members = self._router.members
        held = {m.id: {"blocks": index.blocks(m.id), "blocks_max": index.capacity(m.id)} for m in members}
        return _json({"keys": index.keys, "bytes": index.bytes_used, "bytes_max": index.bytes_max, "replicas": held})

    def _models(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for member in self._router.ready():
            for model in member.models.values():
                row = {"id": model.name, "object": "model", "created": model.created, "owned_by": model.owned_by}
                row |= {"root": model.root, "parent": model.parent, "max_model_len": model.max_model_len_tokens}
                rows.setdefault(model.name, row)
        return rows

    def _replica(self, member: Member, now_s: float) -> dict[str, Any]:
        model = member.prefill_model
        return {
            "id": member.id,
            "name": member.replica.name,
            "node": member.replica.node,
            "instance": member.replica.instance,
            "added": self._added(member.id),
            "warming": self._warming(member.id),
            "ready": member.ready,
            "why": member.health.why if member.replica.ready else "not ready, by discovery",
            "failures_in_a_row": member.breaker.failures,
            "breaker": _breaker(member, now_s),
            "grade": member.grade,
            "grade_why": self._router.knowledge.grade_of(member.id)[1],
            "events": self._events(member.id),
            "models": sorted(member.models),
            "in_flight": len(member.leases),
            "window": self._window(member.id),
            "pending_prefill_ms": round(member.pending_ms(now_s), 1),
            "load": member.load,
            "share": round(member.share, 3),
            "prefill": model,
            "decode_step": member.step_model,
            "answer_tokens": round(member.speeds.answer_tokens.mean, 1),
            "blocks": self._router.index.blocks(member.id),
            "blocks_max": self._router.index.capacity(member.id),
        }

    def _events(self, replica: str) -> dict[str, Any] | None:
        """The state of the replica's event stream and blocks; None if there is no stream."""
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


def _breaker(member: Member, now_s: float) -> dict[str, Any]:
    """The replica's breaker: state, reason, and for how long it gets no requests."""
    state = member.state(now_s)
    until_s = {State.OPEN: member.breaker.until_s, State.RESTING: member.rest_until_s}.get(state, now_s)
    why = "it asked for that" if state is State.RESTING else member.breaker.why
    return {"state": state, "why": why, "for_s": round(until_s - now_s, 1)}


def _decision(record: RequestRecord) -> dict[str, Any]:
    receipt = record.receipt
    return {
        "id": record.id,
        "at_s": round(record.at_s, 3),
        "route": record.route,
        "model": record.model,
        "tenant": record.tenant,
        "status": record.status,
        "ending": record.ending,
        "error": record.error,
        "detail": record.detail,
        "retries": [{"kind": kind, "replica": replica} for kind, replica in record.retries],
        "queued_s": round(record.queued_s, 3),
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
        "usage": _fields(record.usage) if record.usage is not None else None,
        "replica": receipt and receipt.replica,
        "reason": receipt and receipt.reason,
        "grade": receipt and receipt.grade,
        "prompt_tokens": receipt and receipt.prompt_tokens,
        "predicted_cached_tokens": receipt and receipt.predicted_cached_tokens,
        "candidates": [_candidate(c) for c in receipt.candidates] if receipt else [],
        "weighed": receipt.weighed if receipt else 0,
        **_explained(record),
    }


def _explained(record: RequestRecord) -> dict[str, Any]:
    """Why the request's tokens missed the cache; null values without an observatory."""
    miss, seen, replay = record.miss, record.sighting, record.receipt is not None and record.receipt.replay
    return {
        "miss": miss and miss.misses,
        "hit_tokens": miss and miss.hit,
        "verified": record.usage is not None and record.usage.verified,
        "hit": ("replay" if replay else "genuine") if miss and miss.hit else None,
        "saved_ms": miss and round(miss.saved_ms, 1),
        "template": f"{seen.template:016x}" if seen and seen.template else None,
        "conversation": f"{seen.conversation:016x}" if seen and seen.conversation else None,
        "turn": seen and seen.turn,
        "step": seen and seen.step,
        "difference": _difference(seen.difference) if seen and seen.difference else None,
    }


def _difference(difference: Difference) -> dict[str, Any]:
    row = _fields(difference)
    # Hashed with a key: if the shape shows that a piece has few digits, a plain hash would reveal its text.
    named = blake2b(difference.piece_hash.to_bytes(8), digest_size=8, key=_HASH_KEY).hexdigest()
    return {**row, "piece_hash": named}


_HASH_KEY = secrets.token_bytes(16)


def _candidate(candidate: Candidate) -> dict[str, Any]:
    row = _fields(candidate)
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}


def _fields(record: msgspec.Struct) -> dict[str, Any]:
    """The fields of a record, which is no Struct where it is compiled (deploy/compiled_sources.py)."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _json(value: Any) -> web.Response:  # noqa: ANN401 - anything JSON
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)
