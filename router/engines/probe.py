"""Probes of engines for health, models and load, with one loop per replica.

A round requests `/health`, then `/metrics`; `/v1/models` only in the first round and every few rounds after it. A
replica without known models is not ready, because no request could be routed to it. All answers go to the Router, which
evaluates them.

Data-parallel ranks of one server are separate replicas behind one set of pages. The loop of the first rank requests the
pages for all ranks, and each rank gets its own share of the load.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from typing import NamedTuple, TypeVar

import aiohttp
import msgspec
from yarl import URL

from router.config.fd_limits import is_emfile, shortage
from router.config.schema import ProbeSettings
from router.core.fleet.engine_metrics import parse_load
from router.core.fleet.metrics_lines import pages_of_ranks
from router.core.placement.router import Router
from router.core.types.replicas import CapacitySource, Load, Replica, ServedModel, Sleep
from router.engines import http_client
from router.engines.metrics_page import MetricsPages
from router.eventloop import log_exceptions

log = logging.getLogger(__name__)
_T = TypeVar("_T")

ROW_BYTES_MAX = 4 << 10  # maximum bytes of a model's row that are kept
# maximum bytes of rows that are kept of a replica, and of all replicas
ROWS_BYTES_MAX, ALL_ROWS_BYTES_MAX = 1 << 20, 64 << 20
LOOK_S, LOOK_WAIT_S = 1.0, 2.0  # minimum time between two lookups of all replicas' models; maximum wait for one
LOOKERS_MAX, LOOKS_AT_ONCE = 256, 16  # requests that may wait for a lookup; replicas that are read in parallel
FAST_PROBE_ROUNDS = 8  # rounds at four times the pace, after a replica began to refuse connections
PARSE_BYTES_MAX = 16 << 10  # longer metrics are parsed outside of the event loop
PARSE_MODELS_BYTES_MAX = 64 << 10  # maximum page of models that is parsed on the event loop


class _Model(msgspec.Struct):
    id: str
    root: msgspec.Raw = msgspec.Raw()
    parent: msgspec.Raw = msgspec.Raw()
    max_model_len: msgspec.Raw = msgspec.Raw()
    created: msgspec.Raw = msgspec.Raw()
    owned_by: msgspec.Raw = msgspec.Raw()


class _Models(msgspec.Struct):
    data: list[msgspec.Raw] = []


class _Page(NamedTuple):
    """Models of one page."""

    models: list[ServedModel]
    left_out: int  # models beyond the limit, which were not read


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class ProbeFailed(Exception):
    """An engine did not answer as expected. `refused`: no process listens at the address. `unasked`: the router had no
    free file descriptor for the probe, so the engine's state is unknown."""

    def __init__(self, message: str, *, status: int = 0, refused: bool = False, unasked: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.refused = refused
        self.unasked = unasked


class Prober:
    """Probes replicas and passes the results to the Router."""

    def __init__(
        self,
        router: Router,
        on_lost: Callable[[str], None],
        *,
        on_ready: Callable[[str], None] = lambda _: None,
        settings: ProbeSettings,
        pages: MetricsPages,
        kv_tokens_max: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._router = router
        self._on_lost = on_lost
        self._on_ready = on_ready
        self._interval_s = settings.interval_s
        self._models_rounds = max(1, round(settings.models_interval_s / settings.interval_s))
        self._page_bytes_max = settings.page_bytes_max
        self._models_max = settings.models_max
        self._row_bytes: Counter[str] = Counter()  # bytes of kept rows, by server
        self._kv_tokens_max = kv_tokens_max
        self._session = http_client.session(settings.api_key, settings.timeout_s, tls)
        self._pages = pages
        self._without_sleep: set[str] = set()  # servers without a page /is_sleeping
        self._soon: dict[str, int] = {}  # remaining rounds at four times the pace, by replica
        self._wakes: dict[str, asyncio.Event] = {}
        self._stale: set[str] = set()  # replicas with models to be read in the next round, even if they are not due
        self._reread_s: dict[str, float] = {}  # time at which a replica's models were last found to be wrong
        self.left_out: dict[str, int] = {}  # models on a replica's page beyond `models_max`
        self._looking: asyncio.Task[None] | None = None  # the current or last lookup of all replicas' models
        self._looked_s = float("-inf")
        self._lookers = 0

    async def close(self) -> None:
        """Close all connections."""
        if self._looking is not None:
            self._looking.cancel()
        await self._session.close()

    async def watch(self, replica: str) -> None:
        """Probe one replica until cancelled. Rounds are spread, so that not all replicas are probed at once."""
        rounds, wake = 0, self._wakes.setdefault(replica, asyncio.Event())
        while True:
            try:
                due = rounds % self._models_rounds == 0 or replica in self._stale
                await self.probe(replica, models=due or self._unknown(replica))
            except Exception:  # a bug in a page's reader must not end the loop
                log.exception("bug: probe failed", extra={"event": "bug", "fields": {"replica": replica}})
                for rank in self._ranks(replica):
                    self._report_health(rank, ok=False, proof=False, why="bug: its pages could not be processed")
            rounds += 1
            self._soon[replica] = soon = max(0, self._soon.get(replica, 0) - 1)
            interval_s = self._interval_s / 4 if soon else self._interval_s
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s * random.uniform(0.9, 1.1)):  # noqa: S311 - spread, not secrets
                    await wake.wait()
            wake.clear()

    def probe_soon(self, replica: str) -> None:
        """Probe the replica at four times the pace: it began to refuse connections, and may be back soon."""
        self._soon[replica] = FAST_PROBE_ROUNDS
        if replica in self._wakes:
            self._wakes[replica].set()

    def forget(self, replica: str) -> None:
        """Forget a replica that left."""
        self._soon.pop(replica, None)
        self._wakes.pop(replica, None)
        self._stale.discard(replica)
        self._reread_s.pop(replica, None)
        self.left_out.pop(replica, None)
        self._row_bytes.pop(Replica(replica).url, None)
        self._without_sleep.discard(Replica(replica).url)

    def reread(self, replica: str) -> None:
        """Read the replica's models soon, at most once a second, because its list was wrong."""
        first, now_s = self._first(replica), time.monotonic()
        if now_s - self._reread_s.get(first, float("-inf")) >= LOOK_S and first in self._wakes:
            self._reread_s[first] = now_s
            self._stale.add(first)
            self._wakes[first].set()

    async def look(self) -> None:
        """Read the models of all ready replicas. One lookup runs at a time, LOOK_S after the last one at the earliest.
        Returns after LOOK_WAIT_S at most, and at once if too many requests wait already."""
        if self._lookers >= LOOKERS_MAX:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(log_exceptions(self._look()))
        self._lookers += 1
        try:
            await asyncio.wait([self._looking], timeout=LOOK_WAIT_S)
        finally:
            self._lookers -= 1

    async def _look(self) -> None:
        await asyncio.sleep(self._looked_s + LOOK_S - time.monotonic())
        self._looked_s = time.monotonic()
        turns = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def look(replica: str) -> None:
            async with turns:
                with suppress(ProbeFailed):
                    self._serves(replica, await self._models(Replica(replica).url))

        firsts = [member.id for member in self._router.fleet.ready() if not member.replica.rank]
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_WAIT_S):
                await asyncio.gather(*map(look, firsts))

    def _first(self, replica: str) -> str:
        """Return the replica with the loop that probes this one: the first rank of its server."""
        there = Replica(replica)
        return replica if there.rank is None else there.select_rank(0).id

    async def probe(self, replica: str, *, models: bool) -> None:
        """Run one round for all ranks of the server if this is its first rank, otherwise for none."""
        if Replica(replica).rank:
            return
        server = Replica(replica).url
        try:
            await self._get(f"{server}/health")
            served = await self._models(server) if models else None
        except ProbeFailed as failure:
            if failure.unasked:
                return
            for rank in self._ranks(replica):
                self._stale.add(replica)  # another engine may return at this address
                silent = not failure.refused and not failure.status
                self._report_health(rank, ok=False, proof=failure.refused, why=str(failure), silent=silent)
            return
        page = await self._pages.read(server)
        if served is not None:
            self._stale.discard(replica)
            self._serves(replica, served)
        ranks = self._ranks(replica)
        parts: Sequence[str | None] = [page] * len(ranks)
        if Replica(replica).rank is not None and page is not None:
            parts = await asyncio.get_running_loop().run_in_executor(None, pages_of_ranks, page, len(ranks))
        for rank, part in zip(ranks, parts, strict=True):
            load = await self._load(rank, part)
            self._router.observations.observe_load(rank, load, time.monotonic())
            self._judge(rank, load.sleep)

    def _judge(self, rank: str, sleep: Sleep | None) -> None:
        """Report the health of a member that answers to the router."""
        member = self._router.fleet.member(rank)
        if sleep in (Sleep.ASLEEP, Sleep.PAUSED):
            self._report_health(rank, ok=False, proof=False, why=sleep.value, sure=True)
        elif member is None or not member.models:
            self._report_health(rank, ok=False, proof=False, why="serves no model")
        else:
            left_out = self.left_out.get(rank)
            why = f"healthy; {left_out} of its models are ignored (probe.models_max)" if left_out else "healthy"
            self._report_health(rank, ok=True, proof=False, why=why)

    def _ranks(self, replica: str) -> list[str]:
        """Return the ids of all members behind the replica's URL: the server itself, or its ranks, which join and leave
        together."""
        member, server = self._router.fleet.member, Replica(replica)
        if server.rank is None:
            return [replica] if member(replica) is not None else []
        ids = (server.select_rank(rank).id for rank in count())
        return list(takewhile(lambda id_: member(id_) is not None, ids))

    def _unknown(self, replica: str) -> bool:
        ranks = map(self._router.fleet.member, self._ranks(replica))
        return not all(member is not None and member.models for member in ranks)

    def _report_health(
        self, replica: str, *, ok: bool, proof: bool, why: str, silent: bool = False, sure: bool = False
    ) -> None:
        """Report one observation to the Router. `proof`: the engine's process is gone. `sure`: one failure is
        sufficient, although the process exists."""
        member = self._router.fleet.member(replica)
        news = member is not None and member.health.why != why  # each change is logged once, with its reason
        flipped = self._router.fleet.observe_health(replica, ok, why, proof=proof or sure, silent=silent)
        if flipped or (news and not ok):
            event = {"event": "replica_up" if ok else "replica_down", "fields": {"replica": replica, "why": why}}
            level = logging.INFO if ok else logging.WARNING
            text = "receives no requests" if sure else "fails its health checks"
            log.log(level, "replica %s", "ready" if ok else text, extra=event)
        if flipped and ok:
            self._on_ready(replica)
        if proof:
            self._without_sleep.discard(Replica(replica).url)
            if flipped:
                self._router.observations.forget(replica)
                self._soon[replica] = FAST_PROBE_ROUNDS
            self._on_lost(replica)

    def _serves(self, replica: str, page: _Page) -> None:
        """Set the models that a server serves, for each of its ranks."""
        for rank in self._ranks(replica):
            self._router.observations.observe_models(rank, page.models)
            if page.left_out != self.left_out.get(rank, 0):
                self.left_out[rank] = page.left_out
                fields = {"replica": rank, "left_out": page.left_out, "models_max": self._models_max}
                what = (
                    "replica lists more models than the limit" if page.left_out else "all models of a replica are used"
                )
                level = logging.WARNING if page.left_out else logging.INFO
                log.log(level, what, extra={"event": "models_left_out", "fields": fields})

    async def _models(self, server: str) -> _Page:
        page = await self._get(f"{server}/v1/models")
        del self._row_bytes[server]
        left_bytes = min(ROWS_BYTES_MAX, ALL_ROWS_BYTES_MAX - self._row_bytes.total())
        parse = partial(_page_of, page, self._models_max, left_bytes)
        try:
            if len(page) <= PARSE_MODELS_BYTES_MAX:
                read = parse()
            else:
                read = await asyncio.get_running_loop().run_in_executor(None, parse)
        except _UNREADABLE as error:
            raise ProbeFailed(f"/v1/models: {error}") from error
        if not read.models:
            raise ProbeFailed("/v1/models: serves no model")
        self._row_bytes[server] = sum(len(model.row) for model in read.models)
        return read

    async def _load(self, replica: str, page: str | None) -> Load:
        if page is None:  # the last page's load is the best estimate
            member = self._router.fleet.member(replica)
            return member.load if member else Load()
        if len(page) <= PARSE_BYTES_MAX:
            load = parse_load(page)
        else:
            load = await asyncio.get_running_loop().run_in_executor(None, parse_load, page)
        if load.sleep is None and page.find("vllm:") >= 0:
            load = replace(load, sleep=await self._sleep(Replica(replica).url))
        return self._with_capacity(load)

    def _with_capacity(self, load: Load) -> Load:
        if load.kv_tokens_max is None and self._kv_tokens_max:
            return replace(load, kv_tokens_max=self._kv_tokens_max, kv_source=CapacitySource.CONFIG)
        return load

    async def _sleep(self, server: str) -> Sleep | None:
        """Read vLLM's `/is_sleeping`, for releases without that state in their metrics (before 0.11); None without that
        page."""
        if server in self._without_sleep:
            return None
        try:
            asleep = msgspec.json.decode(await self._get(f"{server}/is_sleeping"), type=_Sleeping).is_sleeping
        except ProbeFailed as failure:
            if failure.status:
                self._without_sleep.add(server)
            return None
        except _UNREADABLE:
            self._without_sleep.add(server)
            return None
        return Sleep.ASLEEP if asleep else Sleep.AWAKE

    async def _get(self, url: str) -> bytes:
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    raise ProbeFailed(f"{URL(url).path}: status {response.status}", status=response.status)
                page = await http_client.read_body(response, self._page_bytes_max)
        except TimeoutError as error:
            raise ProbeFailed("no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            if is_emfile(error):
                shortage.report_shortage("a probe of a replica")
                raise ProbeFailed("no file descriptor is left", unasked=True) from error
            cause = getattr(error, "os_error", None)
            refused = getattr(cause, "errno", None) == errno.ECONNREFUSED
            raise ProbeFailed(http_client.describe_error(error), refused=refused) from error
        if len(page) > self._page_bytes_max:
            raise ProbeFailed("page too long")
        return page


def _page_of(page: bytes, models_max: int, rows_bytes_max: int) -> _Page:
    """Return the models of a page, with their rows unless those are too long. Raises one of _UNREADABLE."""
    rows = msgspec.json.decode(page, type=_Models).data
    models, kept_bytes = list[ServedModel](), 0
    for row in rows[:models_max]:
        kept_bytes += len(row)
        keeps = len(row) <= ROW_BYTES_MAX and kept_bytes <= rows_bytes_max
        keeps = keeps and _read(dict, row) is not None  # fields of a row that are not needed have not been parsed yet
        models.append(_to_served_model(msgspec.json.decode(row, type=_Model), bytes(row) if keeps else b""))
    return _Page(models, max(0, len(rows) - models_max))


def _to_served_model(model: _Model, row: bytes = b"") -> ServedModel:
    """Convert a model for the Router. Only its id must be readable."""
    return ServedModel(
        row=row,
        name=model.id,
        root=_read(str, model.root),
        parent=_read(str, model.parent),
        max_model_len_tokens=_read(int, model.max_model_len),
        created=int(_read(float, model.created) or 0),
        owned_by=_read(str, model.owned_by) or "",
    )


def _read(type_: type[_T], raw: msgspec.Raw) -> _T | None:
    try:
        return msgspec.json.decode(raw, type=type_)
    except _UNREADABLE:
        return None
