"""A worker's placer: asks the hub, and goes on by the ring while there is none.

The hub counts as there from its first view on, which it sends once it knows its replicas; then all open leases are
told to it. It counts as lost when the connection breaks, or when it owes an answer for `timeout_s`, unless it said that
the request waits for a place; while any does, the hub is asked every CHECK_S for a page, which it may owe no longer.
What was asked of a lost hub is placed here and taken back there, and so is every other request until something is heard
of the hub again. Nothing is sent per streamed chunk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Self

from router.core.facts.misses import Template
from router.core.facts.placements import Outcome, Receipt, Shed
from router.core.fleet.models import NoReplica
from router.core.placement.wanted import Wanted
from router.hub.owners import ResponseOwners
from router.placer import LEFT, Edges, NoEdges, Page, TokenView, UnknownResponse
from router.settings.schema import Settings
from router.telemetry.process_counts import CONNECTIONS, HUB_LOST
from router.telemetry.record import RequestRecord
from router.workers import codec, messages
from router.workers.link import Line
from router.workers.template_news import Telling
from router.workers.view import Known

log = logging.getLogger(__name__)

TICK_S = 0.05
CHECK_S = 1.0  # between two questions whether a hub in whose queue requests wait is still there
CHECK_PAGE = "/healthz"
PAGE_S = 5.0  # a page may take: a scrape of a large fleet
REPORTS_MAX = 65_536  # kept for the hub's return
BROKEN = "connection broke"
SILENT = "no answer in time"
LEAVING = "we leave"


class RemoteLease:
    """A lease of the hub's, or one that this worker gave itself."""

    __slots__ = ("first_token_s", "id", "model", "receipt", "stands", "streams")

    def __init__(self, id_: int, receipt: Receipt, wanted: Wanted) -> None:
        self.id = id_
        self.receipt = receipt
        self.model = wanted.model
        self.streams = wanted.ask.stream
        self.first_token_s: float | None = None
        self.stands = True  # its replica has not left since

    @property
    def replica(self) -> str:
        """Id of the replica."""
        return self.receipt.replica


@dataclass(slots=True)
class _Asked:
    """A placement that the hub was asked for."""

    wanted: Wanted
    future: asyncio.Future[RemoteLease | None]
    at_s: float  # since when it is there


class RemotePlacer:
    """Placer over a connection to the hub: `async with RemotePlacer(...) as placer`."""

    def __init__(
        self,
        path: str,
        worker: int,
        settings: Settings,
        *,
        figures: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
        queue_bytes_max: int = messages.QUEUE_BYTES_MAX,
    ) -> None:
        """`path` is that of the hub's socket, `worker` the number of this one; `figures` gives totals of this process
        besides its edge's."""
        self._edges: Edges = NoEdges()
        self._line = Line(
            path,
            opened=self._opened,
            heard=self._heard,
            broken=self._broken,
            in_flight=lambda: self._edges.in_flight,
            queue_bytes_max=queue_bytes_max,
        )
        self._worker = worker
        self._figures = figures
        self._told: Mapping[str, int] = {}
        self._telling = Telling(self._changed_templates, settings.observatory.templates_max)
        self._clock = clock
        self._timeout_s = settings.listen.hub_timeout_s  # of a placement by the hub, before it is made by the ring
        self._known = Known()
        self._owners = ResponseOwners(settings.limits.response_ids_max, private=bool(settings.auth.keys_file))
        self._leases: dict[int, RemoteLease] = {}
        self._placing: dict[int, _Asked] = {}  # oldest first
        self._queued: dict[int, _Asked] = {}  # these wait there for a place, which may take long
        self._paging: dict[int, asyncio.Future[Page | None]] = {}
        self._check: tuple[int, float] | None = None  # page asked for to see whether the hub is there, and since when
        self._checked_s = 0.0
        self._kept: deque[messages.Report] = deque(maxlen=REPORTS_MAX)
        self._alone = 0  # placements without the hub, since it was lost
        self._alone_total = 0
        self._next_id = 1
        self._viewed = False  # by this connection
        self.viewed = asyncio.Event()  # by any
        self._why_lost = "not connected yet"

    async def __aenter__(self) -> Self:
        """Begin to connect; places by the ring until then, as soon as a view has come."""
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        await self._line.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Tell what is left to tell, and leave."""
        self._ticker.cancel()
        self._why_lost = self._why_lost or LEAVING
        await self._line.close()

    def serve(self, edges: Edges) -> None:
        """From now on this edge is told of replicas, and asked what it has counted."""
        self._edges = edges

    def _changed_templates(self) -> Iterable[Template]:
        return chain.from_iterable(self._edges.templates().values())

    @property
    def placing(self) -> bool:
        """Whether the hub places; else the ring does."""
        return not self._why_lost

    # -- Placer --------------------------------------------------------------------------------------------------

    def resolve(self, model: str | None) -> str:
        """The model meant, by the hub's last view. Raises UnknownModel, or NoReplica when nothing is ready."""
        return self._known.resolve(model)

    def engines(self, model: str) -> tuple[str, ...]:
        """Kinds of engines that serve it, by the hub's last view."""
        return self._known.engines(model)

    def known_as(self, model: str) -> str:
        """The name that its chains begin with, by the hub's last view."""
        return self._known.known_as(model)

    def follows(self) -> bool:
        """Whether any prompt is wanted as token ids."""
        return not self._why_lost and self._known.follows

    def token_view(self, model: str) -> TokenView | None:
        """By the hub's last view; None without the hub, where token ids are of no use."""
        return None if self._why_lost else self._known.token_view(model)

    async def place(self, wanted: Wanted, exclude: frozenset[str]) -> RemoteLease:
        """A lease from the hub, or by the ring where the hub does not answer. Raises NoReplica, Shed and
        UnknownResponse."""
        if not self._why_lost and codec.carried_bytes(wanted) <= codec.PLACE_BYTES_MAX:
            lease = await self._ask(wanted, exclude)
            if lease is not None:
                return lease
        return self._place_alone(wanted, exclude)

    async def _ask(self, wanted: Wanted, exclude: frozenset[str]) -> RemoteLease | None:
        """None when the hub does not answer. Raises NoReplica, Shed and UnknownResponse."""
        id_ = self._new_id()
        future: asyncio.Future[RemoteLease | None] = self._loop.create_future()
        self._placing[id_] = _Asked(wanted, future, self._clock())
        self._line.say(codec.place_of(id_, wanted, exclude, ids=self._known.ids))
        try:
            return await future
        except asyncio.CancelledError:
            self._placing.pop(id_, None)
            self._queued.pop(id_, None)
            lease = self._leases.get(id_)  # it came at the last moment
            if lease is not None:
                self.finish(lease, LEFT, self._clock())
            else:
                self._line.say(codec.finish_of(id_, LEFT, self._clock()))
            raise

    def _place_alone(self, wanted: Wanted, exclude: frozenset[str]) -> RemoteLease:
        receipt = self._known.by_ring(wanted, exclude, self._owners.owner(wanted.response_id, wanted.tenant))
        self._alone += 1
        self._alone_total += 1
        lease = self._open(RemoteLease(self._new_id(), receipt, wanted))
        self._line.say(_adopt(lease))
        return lease

    def _open(self, lease: RemoteLease) -> RemoteLease:
        self._leases[lease.id] = lease
        self._known.loads[lease.replica] += 1
        return lease

    def _new_id(self) -> int:
        id_ = self._next_id
        self._next_id += 1
        return id_

    def stands(self, lease: RemoteLease) -> bool:
        """Whether the hub has not said meanwhile that its replica left."""
        return lease.stands

    def first_token(self, lease: RemoteLease, now_s: float) -> None:
        """The first body event of a stream arrived."""
        if lease.first_token_s is None:
            lease.first_token_s = now_s
            self._line.say(messages.FirstToken(lease.id, now_s))

    def finish(self, lease: RemoteLease, outcome: Outcome, now_s: float) -> None:
        """Give a lease back, whatever the end. A second time changes nothing."""
        if self._leases.pop(lease.id, None) is None:
            return
        loads = self._known.loads
        loads[lease.replica] -= 1
        if not loads[lease.replica]:
            del loads[lease.replica]
        self._line.say(codec.finish_of(lease.id, outcome, now_s))

    def refused(self, replica: str) -> None:
        """Nobody listens there any more. The hub tells all workers; without it, it is known here at least."""
        if self._why_lost:
            self._known.drop(replica)
            self._edges.lost(replica)
        self._line.say(messages.Refused(replica))

    def alive(self, replica: str) -> None:
        """Something came of its work."""
        self._line.say(messages.Alive(replica))

    def rest(self, replica: str, for_s: float) -> None:
        """It asked to be sent nothing for so long. The hub keeps to that; the ring does not."""
        self._line.say(messages.Rest(replica, for_s))

    def others_ready(self, tried: frozenset[str]) -> bool:
        """Whether a replica is ready that is not among these, by the hub's last view."""
        return self._known.others_ready(tried)

    def made_response(self, response_id: str, replica: str, tenant: str) -> None:
        """The replica made a stored response: known to all through the hub, and here when there is none."""
        self._owners.learn(response_id, replica, tenant)
        self._line.say(messages.Made(response_id, replica, tenant))
        self._line.flush()  # before the client hears of it, and asks another worker

    def failed(self, replica: str, kind: str) -> None:
        """An attempt failed."""
        self._line.say(messages.Failed(replica, kind))

    def report(self, record: RequestRecord) -> None:
        """A request ended: metrics are the hub's, now or when it is back."""
        receipt, lease = record.receipt, None
        if receipt is not None and receipt.at_hub is not None and self._line.up:
            given, connection = receipt.at_hub
            lease = given if connection == self._line.number else None
        report = codec.report_of(record, lease)
        if not self._line.up:
            self._kept.append(report)
        else:
            self._line.say(report)

    async def page(self, path: str) -> Page | None:
        """The hub's page; 503 where there is no hub."""
        if not self._line.up:
            return _NO_HUB
        id_ = self._new_id()
        future: asyncio.Future[Page | None] = self._loop.create_future()
        self._paging[id_] = future
        self._line.say(messages.PageWanted(id_, path))
        try:
            async with asyncio.timeout(PAGE_S):
                return await future
        except TimeoutError:
            return _NO_HUB
        finally:
            self._paging.pop(id_, None)

    # -- what the hub says ---------------------------------------------------------------------------------------

    def _heard(self, answers: list[messages.FromHub]) -> None:
        """One frame of the hub's."""
        for answer in answers:
            if isinstance(answer, messages.Placed):
                self._answered(answer.id, self._receipt(answer))
            elif isinstance(answer, messages.Unplaced):
                self._answered(answer.id, _why_not(answer))
            elif isinstance(answer, messages.Queued):
                self._wait(answer.id)
            elif isinstance(answer, messages.View):
                self._known.take(answer)
                self._viewed = True
                self.viewed.set()
            elif isinstance(answer, messages.Lost):
                self._known.drop(answer.replica)
                self._edges.lost(answer.replica)
            elif isinstance(answer, messages.Left):
                for lease in self._leases.values():
                    if lease.replica == answer.replica:
                        lease.stands = False
                self._edges.left(answer.replica)
            elif isinstance(answer, messages.Stuck):
                self._edges.stuck(answer.replica)
            else:
                if self._check is not None and answer.id == self._check[0]:
                    self._check = None
                paging = self._paging.pop(answer.id, None)
                if paging is not None and not paging.done():
                    paging.set_result(Page(*answer.page) if answer.page else None)
        if self._viewed and self._why_lost:
            self._back()

    def _receipt(self, placed: messages.Placed) -> Receipt:
        tokens = (placed.prompt_tokens, placed.predicted_cached_tokens)
        head = (placed.replica, placed.policy, placed.reason, placed.grade)
        at_hub = (placed.id, self._line.number)
        return Receipt(*head, *tokens, miss=placed.miss, replay=placed.replay, at_hub=at_hub)

    def _wait(self, id_: int) -> None:
        """The hub has it in its queue."""
        asked = self._placing.pop(id_, None)
        if asked is not None:
            asked.at_s = self._clock()
            self._queued[id_] = asked

    def _answered(self, id_: int, answer: Receipt | Exception | None) -> None:
        asked = self._placing.pop(id_, None)
        if asked is None:
            asked = self._queued.pop(id_, None)
            if asked is None:
                return  # taken back meanwhile, which the hub is told
            asked.wanted.queued_s = self._clock() - asked.at_s
        if asked.future.done():
            return  # likewise
        if isinstance(answer, Exception):
            asked.future.set_exception(answer)
        elif answer is None:
            asked.future.set_result(None)
        else:
            asked.future.set_result(self._open(RemoteLease(id_, answer, asked.wanted)))

    def _back(self) -> None:
        self._why_lost = ""
        fields = {"worker": self._worker, "placements_by_ring": self._alone}
        self._alone = 0
        log.info("the hub places", extra={"fields": fields})

    def _gone(self, why: str) -> None:
        """The hub does not place: said once, and whoever waits for it goes on."""
        if not self._why_lost:
            log.warning("the hub is lost: placing by the ring", extra={"fields": {"worker": self._worker, "why": why}})
        self._why_lost, self._check = why, None
        now_s = self._clock()
        for id_ in [*self._placing, *self._queued]:
            self._line.say(codec.finish_of(id_, LEFT, now_s))
            self._answered(id_, None)

    # -- connection ----------------------------------------------------------------------------------------------

    def _opened(self) -> list[messages.FromWorker]:
        """What the hub must hear first: what is open, and what happened without it."""
        self._viewed = False
        self._telling.again()
        self._told = {name: total for name, total in self._told.items() if name != CONNECTIONS}  # no total, but a level
        told: list[messages.FromWorker] = [
            messages.Hello(self._worker, os.getpid()),
            *map(_adopt, self._leases.values()),
            *self._kept,
        ]
        self._kept.clear()
        return told

    def _broken(self, unsaid: list[messages.FromWorker]) -> None:
        """The hub, or the way to it, is gone."""
        self._kept.extend(message for message in unsaid if isinstance(message, messages.Report))
        self._gone(BROKEN)
        for future in self._paging.values():
            if not future.done():
                future.set_result(_NO_HUB)

    def _tick(self) -> None:
        """Every TICK_S: what the hub owes for too long, and counts that nothing else carried."""
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        oldest, now_s = next(iter(self._placing.values()), None), self._clock()
        owed_s = [oldest.at_s] if oldest is not None else []
        if self._check is not None:
            owed_s.append(self._check[1])
        if owed_s and now_s - min(owed_s) > self._timeout_s:
            self._gone(SILENT)
        elif self._queued and not owed_s and now_s - self._checked_s > CHECK_S:
            self._check, self._checked_s = (self._new_id(), now_s), now_s
            self._line.say(messages.PageWanted(self._check[0], CHECK_PAGE))
        if self._viewed and self._line.up:
            self._count()
            if templates := self._telling.due(now_s):
                self._line.say(messages.Templates(templates))
        self._line.flush()

    def _count(self) -> None:
        figures = {**self._edges.figures(), **self._figures(), HUB_LOST: self._alone_total}
        if figures != self._told:
            more = {name: total - self._told.get(name, 0) for name, total in figures.items()}
            self._told = figures
            self._line.say(messages.Counts(more))


def _why_not(unplaced: messages.Unplaced) -> Exception | None:
    """None where the hub cannot say."""
    if unplaced.failed:
        return None
    if unplaced.shed is not None:
        return Shed(*unplaced.shed)
    return NoReplica() if unplaced.unknown_response is None else UnknownResponse(unplaced.unknown_response)


def _adopt(lease: RemoteLease) -> messages.Adopt:
    receipt = lease.receipt
    return messages.Adopt(
        lease.id, lease.replica, lease.model, lease.streams, receipt.prompt_tokens, lease.first_token_s
    )


_NO_HUB = Page(503, "text/plain; charset=utf-8", b"the hub is not there\n")
