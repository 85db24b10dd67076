"""Worker's placer: places through the hub, and by the ring while the hub is lost.

hub_watch decides if the hub is available. A new hub gets all open leases. No message is sent per streamed chunk.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Self

from router.config.schema import Settings
from router.control.response_owners import ResponseOwners
from router.core.admission.rate_limits import Rates
from router.core.placement.placement_request import PlacementRequest
from router.core.types.misses import Template
from router.core.types.placements import Outcome, Receipt, Shed
from router.core.types.requests import Priority
from router.multiprocess import codec, protocol
from router.multiprocess.control_health import BROKEN, CHECK_PAGE, SILENT, ControlHealth
from router.multiprocess.control_link import HubLink
from router.multiprocess.rate_quota import WorkerQuotas
from router.multiprocess.remote_lease import RemoteLease
from router.multiprocess.replica_view import CachedReplicaView
from router.multiprocess.template_updates import TemplateUpdates
from router.placement_api import LEFT, MODELS, Frontends, HttpPage, NullFrontends, RequestPrincipal, TokenizationSpec
from router.telemetry.process_totals import HUB_LOST, LEVELS
from router.telemetry.record import RequestRecord

TICK_S = 0.05
VIEW_WAIT_S = 0.5  # longest wait for the view of a hub that found a model
PATH_CHARS_MAX = MODEL_CHARS_MAX = 1_024  # longest path of a page of the hub's; longest name of a model
PAGE_S = 5.0  # longest wait for a page of the hub's, such as the metrics of a large fleet
OWNERS_PER_TICK = 1_000  # stored responses that are reported to a new hub in one tick: a millisecond's work
REPORTS_MAX = 65_536  # ends of requests that are kept until the hub is back

_NO_HUB = HttpPage(503, "text/plain; charset=utf-8", b"the hub is not there\n")
_READY = HttpPage(200, "text/plain; charset=utf-8", b"ready\n")


class RemotePlacementService:
    """Placer over a connection to the hub: `async with RemotePlacementService(...) as placer`."""

    def __init__(
        self,
        path: str,
        worker: int,
        settings: Settings,
        *,
        figures: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
        queue_bytes_max: int = protocol.QUEUE_BYTES_MAX,
    ) -> None:
        """Create the placer.

        - `path`: the hub's socket.
        - `worker`: number of this worker.
        - `figures`: returns totals of this process in addition to its edge's.
        """
        self._edges: Frontends = NullFrontends()
        self._link = HubLink(
            path,
            opened=self._make_first_messages,
            heard=self._on_frame,
            broken=self._on_disconnected,
            in_flight=lambda: self._edges.in_flight,
            queue_bytes_max=queue_bytes_max,
        )
        self._worker = worker
        self._figures = figures
        self._sent_counters: Mapping[str, int] = {}
        self._news = TemplateUpdates(self._changed_templates, settings.insights.templates_max)
        self._clock = clock
        self._hub = ControlHealth(worker, timeout_s=settings.listen.hub_timeout_s, clock=clock)
        self._view = CachedReplicaView()
        self._rates = WorkerQuotas(settings.listen.workers, clock)
        self._owners = ResponseOwners(settings.limits.response_ids_max, private=bool(settings.auth.keys_file))
        self._unsent_owners: deque[str] = deque()  # stored responses that are not reported to this hub yet
        self._leases: dict[int, RemoteLease] = {}
        self._paging: dict[int, asyncio.Future[HttpPage | None]] = {}
        self._kept: deque[protocol.Report] = deque(maxlen=REPORTS_MAX)
        self._next_id = 1
        self.viewed = asyncio.Event()  # set once the first view has arrived, on any connection
        self._handlers: dict[type, Callable[[Any], None]] = {
            protocol.LeaseOpened: lambda said: self._resolve_placement(
                said.id, codec.receipt_of(said, self._link.number)
            ),
            protocol.Unplaced: lambda said: self._resolve_placement(said.id, codec.error_of(said)),
            protocol.Queued: lambda said: self._hub.queue(said.id),
            protocol.ReplicaView: self._take_view,
            protocol.UnreachableNotice: self._on_replica_unreachable,
            protocol.RemovedNotice: self._on_replica_removed,
            protocol.StalledNotice: lambda said: self._edges.on_replica_stalled(said.replica),
            protocol.Working: lambda said: self._edges.on_replicas_progress(said.moving, said.uncounted),
            protocol.PageAnswer: self._page,
            protocol.RatesLeft: lambda said: self._rates.on_levels(said.levels),
        }

    async def __aenter__(self) -> Self:
        """Begin to connect. Requests can be placed after the first view."""
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        await self._link.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send the remaining messages, and leave."""
        self._ticker.cancel()
        self._hub.note_shutdown()
        await self._link.close()

    def serve(self, edges: Frontends) -> None:
        """Serve this edge. It is notified of replica changes, and reports its counters."""
        self._edges = edges

    def _changed_templates(self) -> Iterable[Template]:
        return chain.from_iterable(self._edges.templates().values())

    @property
    def placing(self) -> bool:
        """True if the hub places; if not, the ring does."""
        return self._hub.is_available

    # -- Placer --------------------------------------------------------------------------------------------------

    def resolve(self, model: str | None) -> str:
        """Return the model meant, by the hub's last view. Raises UnknownModel, or NoReplicaReady if no replica is
        ready."""
        return self._view.resolve(model)

    def engines(self, model: str) -> tuple[str, ...]:
        """Return the kinds of engines that serve the model, by the hub's last view."""
        return self._view.engines(model)

    def find_expected_base(self, model: str | None) -> str:
        """Return the base model of a name, or of a missing name, if its replicas may all be gone; "" otherwise."""
        return self._view.find_expected_base(model)

    def context_tokens(self, model: str | None) -> int:
        """Return the longest context that any replica has for the model, by the hub's last view."""
        return self._view.context_tokens(model)

    def parent(self, model: str) -> str:
        """Return the base model of a LoRA adapter, by the hub's last view; "" for any other name."""
        return self._view.parent(model)

    async def look(self, model: str) -> None:
        """Make the hub read the replicas' model lists again, as it does for the page of a model that it does not know.
        If it finds the model, it sends the new view at once."""
        page = await self.page(f"{MODELS}/{model}")
        until_s = self._clock() + VIEW_WAIT_S
        found = page is not None and page.status == 200
        while found and not self._view.serves(model) and self._clock() < until_s:  # noqa: ASYNC110 - rare, short
            await asyncio.sleep(TICK_S)

    def lacks(self, replica: str, model: str) -> None:
        """Report that the replica does not serve a model of its list."""
        self._link.say(protocol.ModelLacked(replica, model[:MODEL_CHARS_MAX]))

    def cache_identity(self, model: str) -> str:
        """Return the name with which chains of the model begin, by the hub's last view."""
        return self._view.known_as(model)

    def wants_token_ids(self) -> bool:
        """True if any prompt is wanted as token ids."""
        return self._hub.is_available and self._view.follows

    def tokenization_spec(self, model: str) -> TokenizationSpec | None:
        """Return the hub's last data for token ids of the model; None without the hub, because token ids have no use
        then."""
        return self._view.token_view(model) if self._hub.is_available else None

    def set_tenants(self, tenants: Mapping[str, Rates]) -> None:
        """Replace the rates of all tenants, by tenant name."""
        self._rates.configure(tenants)

    def reserve_rate(self, tenant: str, priority: Priority) -> bool:
        """Check the tenant's rate by the hub's last level. Without the hub, charge this worker's part. Raises Shed."""
        try:
            return self._rates.charge(tenant)
        except Shed as shed:
            self._link.say(protocol.RequestShed(shed.code, priority))
            raise

    async def place(self, wanted: PlacementRequest, exclude: frozenset[str]) -> RemoteLease:
        """Return a lease from the hub, or by the ring if the hub does not answer. Raises NoReplicaReady, Shed and
        UnknownResponse."""
        if self._hub.is_available and codec.encoded_size(wanted) <= codec.PLACE_BYTES_MAX:
            lease = await self._ask(wanted, exclude)
            if lease is not None:
                return lease
        return self._place_by_ring(wanted, exclude)

    async def _ask(self, wanted: PlacementRequest, exclude: frozenset[str]) -> RemoteLease | None:
        """Return a lease from the hub; None if it does not answer. Raises NoReplicaReady, Shed and UnknownResponse."""
        id_ = self._new_id()
        future: asyncio.Future[RemoteLease | None] = self._loop.create_future()
        self._hub.ask(id_, wanted, future)
        if (
            self._unsent_owners
            and wanted.response_id
            and (told := self._make_owner_message(wanted.response_id)) is not None
        ):
            self._link.say(told)
        self._link.say(codec.place_of(id_, wanted, exclude, ids=self._view.ids))
        try:
            return await future
        except asyncio.CancelledError:
            self._hub.forget(id_)
            lease = self._leases.get(id_)  # the answer came at the last moment
            if lease is not None:
                self.finish(lease, LEFT, self._clock())
            else:
                self._link.say(codec.finish_of(id_, LEFT, self._clock()))
            raise

    def _place_by_ring(self, wanted: PlacementRequest, exclude: frozenset[str]) -> RemoteLease:
        receipt = self._view.pick_by_ring(wanted, exclude, self._owners.owner(wanted.response_id, wanted.tenant))
        charged_tokens = 0
        if wanted.tenant and not exclude:  # a retry is not charged again
            tokens = wanted.tokens.tokens if wanted.tokens is not None else wanted.body_tokens
            charged_tokens = self._rates.placed_alone(wanted.tenant, tokens, counted=wanted.charged)
        self._hub.count_fallback()
        lease = self._open(RemoteLease(self._new_id(), receipt, wanted))
        lease.charged_tokens = charged_tokens
        self._link.say(_adopt(lease))
        return lease

    def _open(self, lease: RemoteLease) -> RemoteLease:
        self._leases[lease.id] = lease
        self._view.loads[lease.replica] += 1
        return lease

    def _new_id(self) -> int:
        id_ = self._next_id
        self._next_id += 1
        return id_

    def is_valid(self, lease: RemoteLease) -> bool:
        """True if the hub has not reported that the lease's replica left."""
        return lease.stands

    def first_token(self, lease: RemoteLease, now_s: float) -> None:
        """Record the first body event of a stream."""
        if lease.first_token_s is None:
            lease.first_token_s = now_s
            self._link.say(protocol.FirstToken(lease.id, now_s))

    def finish(self, lease: RemoteLease, outcome: Outcome, now_s: float) -> None:
        """Return a lease, with any outcome. A second call changes nothing."""
        if self._leases.pop(lease.id, None) is None:
            return
        loads = self._view.loads
        loads[lease.replica] -= 1
        if not loads[lease.replica]:
            del loads[lease.replica]
        if lease.charged_tokens:
            usage = outcome.usage
            used = usage.prompt_tokens + usage.completion_tokens - lease.charged_tokens if usage else outcome.events
            self._rates.settle(lease.tenant, used)
        self._link.say(codec.finish_of(lease.id, outcome, now_s))

    def report_connection_refused(self, replica: str) -> None:
        """Report a refused connection. The hub notifies all workers. Without a hub, only this worker updates its
        view."""
        if not self._hub.is_available:
            self._view.drop(replica)
            self._edges.on_replica_unreachable(replica)
        self._link.say(protocol.ReplicaRefused(replica))

    def note_progress(self, replica: str) -> None:
        """Report a further part of an answer of the replica."""
        self._link.say(protocol.ProgressNotice(replica))

    def set_cooldown(self, replica: str, for_s: float, *, full: bool = False) -> None:
        """Report the replica's request for a cooldown. The hub applies it; the ring does not."""
        self._link.say(protocol.Cooldown(replica, for_s, full))

    def report_pull_timeout(self, source: str) -> None:
        """Report that a P2P KV transfer from this replica got no answer in time."""
        self._link.say(protocol.SourceStalled(source))

    def finish_prefill(self, lease: RemoteLease, outcome: Outcome, now_s: float) -> None:
        """Report the end of the lease's prefill stage. A new hub does not know that stage."""
        self._link.say(codec.prefilled_of(lease.id, lease.receipt, outcome, now_s))

    def report_pair_failure(self, prefill: str, decode: str) -> None:
        """Report a disaggregated request that failed at its decoding replica, for example because blocks did not
        arrive."""
        self._link.say(protocol.TransferFailedNotice(prefill, decode))

    def has_other_ready(self, tried: frozenset[str]) -> bool:
        """True if a replica other than these is ready, by the hub's last view."""
        return self._view.has_other_ready(tried)

    def ready_one(self) -> str | None:
        """Return the first of the replicas that are ready, by the hub's last view."""
        return self._view.ready_one()

    def readiness_summary(self) -> str:
        """Return the text about ready replicas of the hub's last view."""
        return self._view.standing

    def register_response_owner(self, response_id: str, replica: str, tenant: str) -> None:
        """Record a stored response that the replica made, and report it to all workers through the hub."""
        self._owners.learn(response_id, replica, tenant)
        self._link.say(protocol.ResponseMade(response_id, replica, tenant))
        self._link.flush()  # send it to the hub before the client learns the id, and uses another worker

    def count_attempt_failure(self, replica: str, kind: str) -> None:
        """Report an attempt that failed."""
        self._link.say(protocol.AttemptFailed(replica, kind))

    def record_request(self, record: RequestRecord) -> None:
        """Report the end of a request to the hub, which has the metrics. Without a hub, the report is kept until it is
        back."""
        receipt, lease = record.receipt, None
        if receipt is not None and receipt.at_hub is not None and self._link.up:
            given, connection = receipt.at_hub
            lease = given if connection == self._link.number else None
        report = codec.report_of(record, lease)
        if not self._link.up:
            self._kept.append(report)
        else:
            self._link.say(report)

    async def page(self, path: str, owner: RequestPrincipal | None = None, accept: str = "") -> HttpPage | None:
        """Return one of the hub's pages. Without a hub it is a 503, except that `/readyz` follows the last view, as
        placement does."""
        if not self._link.up:
            return self._make_fallback_page(path)
        if len(path) > PATH_CHARS_MAX:
            return None
        id_ = self._new_id()
        future: asyncio.Future[HttpPage | None] = self._loop.create_future()
        self._paging[id_] = future
        said = (owner.tenant, owner.receipts, owner.isolated) if owner is not None else None
        self._link.say(protocol.PageWanted(id_, path, said, accept))
        try:
            async with asyncio.timeout(PAGE_S):
                page = await future
        except TimeoutError:
            page = _NO_HUB
        finally:
            self._paging.pop(id_, None)
        return self._make_fallback_page(path) if page is _NO_HUB else page

    def _make_fallback_page(self, path: str) -> HttpPage:
        return _READY if path == "/readyz" and self._view.has_other_ready(frozenset()) else _NO_HUB

    # -- messages of the hub -------------------------------------------------------------------------------------

    def _on_frame(self, said: list[protocol.FromHub]) -> None:
        """Process one frame from the hub."""
        for message in said:
            self._handlers[type(message)](message)
        self._hub.on_message()
        if self._hub.is_available:
            self._rates.on_control_found(self._view.hub)

    def _take_view(self, said: protocol.ReplicaView) -> None:
        self._view.take(said)
        self._hub.viewed = True
        self._rates.on_control_found(said.hub)
        self._tell_spent()  # before any request to a hub that may be new
        self.viewed.set()

    def _on_replica_unreachable(self, said: protocol.UnreachableNotice) -> None:
        self._view.drop(said.replica)
        self._edges.on_replica_unreachable(said.replica)

    def _on_replica_removed(self, said: protocol.RemovedNotice) -> None:
        for lease in self._leases.values():
            if lease.replica == said.replica:
                lease.stands = False
        self._edges.on_replica_removed(said.replica)

    def _page(self, said: protocol.PageAnswer) -> None:
        self._hub.on_page(said.id)
        paging = self._paging.pop(said.id, None)
        if paging is not None and not paging.done():
            paging.set_result(HttpPage(*said.page) if said.page else None)

    def _resolve_placement(self, id_: int, answer: Receipt | Exception | None) -> None:
        """Pass an answer to the waiting call. None means that the hub does not place the request."""
        pending = self._hub.take(id_)
        if pending is None or pending.future.done():
            return  # the placement was cancelled in the meantime, and the hub was notified
        if isinstance(answer, Exception):
            pending.future.set_exception(answer)
        elif answer is None:
            pending.future.set_result(None)
        else:
            pending.future.set_result(self._open(RemoteLease(id_, answer, pending.wanted)))

    def _fall_back(self, why: str) -> None:
        """Handle a lost hub: its pending placements are cancelled, and their callers place by the ring."""
        self._rates.on_control_lost()
        now_s = self._clock()
        for id_ in self._hub.on_control_lost(why):
            self._link.say(codec.finish_of(id_, LEFT, now_s))
            self._resolve_placement(id_, None)

    # -- connection ----------------------------------------------------------------------------------------------

    def _make_first_messages(self) -> list[protocol.FromWorker]:
        """Return the first messages to the hub: open leases, and reports from the time without it."""
        self._hub.viewed = False
        self._news.resend_all()
        # A new hub gets a level, such as open connections, as its value; it gets totals as differences.
        self._sent_counters = {name: total for name, total in self._sent_counters.items() if name not in LEVELS}
        told: list[protocol.FromWorker] = [
            protocol.Hello(self._worker, os.getpid()),
            *map(_adopt, self._leases.values()),
            *self._kept,
        ]
        self._kept.clear()
        self._unsent_owners = deque(self._owners.ids())
        told += self._resend_owners()
        return told

    def _resend_owners(self) -> list[protocol.FromWorker]:
        """Return stored responses that this worker knows and the hub may not, limited to a millisecond's work."""
        ids = [self._unsent_owners.popleft() for _ in range(min(OWNERS_PER_TICK, len(self._unsent_owners)))]
        return [told for id_ in ids if (told := self._make_owner_message(id_)) is not None]

    def _make_owner_message(self, response_id: str) -> protocol.ResponseMade | None:
        made = self._owners.owner_entry(response_id)
        return protocol.ResponseMade(response_id, *made) if made is not None else None

    def _on_disconnected(self, unsaid: list[protocol.FromWorker]) -> None:
        """Handle a broken connection to the hub."""
        self._kept.extend(message for message in unsaid if isinstance(message, protocol.Report))
        self._fall_back(BROKEN)
        for future in self._paging.values():
            if not future.done():
                future.set_result(_NO_HUB)

    def _tick(self) -> None:
        """Check the hub's availability, and send periodic reports. Called every TICK_S."""
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        if self._hub.overdue():
            self._fall_back(SILENT)
        elif self._hub.check_due():
            id_ = self._new_id()
            self._hub.check(id_)
            self._link.say(protocol.PageWanted(id_, CHECK_PAGE))
        if self._hub.viewed and self._link.up:
            self._count()
            self._tell_spent()
            for told in self._resend_owners():
                self._link.say(told)
            if templates := self._news.due(self._clock()):
                self._link.say(protocol.TemplatesSeen(templates))
        self._link.flush()

    def _tell_spent(self) -> None:
        if spent := self._rates.take_unreported():
            self._link.say(protocol.RateSpent(spent))

    def _count(self) -> None:
        figures = {**self._edges.counters(), **self._figures(), HUB_LOST: self._hub.alone_total}
        if figures != self._sent_counters:
            more = {name: total - self._sent_counters.get(name, 0) for name, total in figures.items()}
            self._sent_counters = figures
            self._link.say(protocol.FigureCounts(more))


def _adopt(lease: RemoteLease) -> protocol.AdoptLease:
    tokens = lease.receipt.prompt_tokens
    return protocol.AdoptLease(lease.id, lease.replica, lease.model, lease.streams, tokens, lease.first_token_s)
