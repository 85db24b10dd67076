"""The hub's side: places for all workers, keeps their open leases, and represents them as the hub's `Frontends`.

Each worker has one connection. The requests of a frame are placed in order, and their answers leave in one frame. A
request that waits for a KV event or in the queue is answered later, in a separate frame. When a connection ends for any
reason, the leases of its worker are returned as if all its clients had left, because they have.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, cast

from router.control.local_placement import LocalPlacementService
from router.core.admission.queue import Ticket
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady, UnknownModel, longest_context
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.types.disagg_types import Role
from router.core.types.misses import Template
from router.core.types.placements import Receipt, Shed
from router.core.types.replicas import ServedModel
from router.core.types.requests import RequestSpec
from router.multiprocess import codec, protocol
from router.placement_api import LEFT, RequestPrincipal, UnknownResponse
from router.telemetry.process_totals import LEVELS
from router.telemetry.record import RequestRecord

log = logging.getLogger(__name__)

VIEW_S = 0.1  # interval of the checks for changes of the view
VIEW_PART_MAX = 0.01  # part of the hub's time that these checks may take
RECEIPTS_MAX = 4_096  # receipts kept per worker, of ended leases with a report that has not arrived yet
LEASES_MAX = 1 << 17  # open leases per worker: more than a process has sockets
BACKLOG = 64


class ControlPlaneApi(Protocol):
    """The part of a hub that the server needs."""

    router: Router
    placer: LocalPlacementService

    def observe(self, record: RequestRecord) -> None:
        """Add a request that ended to metrics and `/admin/decisions`. The worker writes its log line."""


class ControlServer:
    """Serves workers on a bound unix socket: `async with ControlServer(hub, sock) as server`."""

    def __init__(
        self,
        hub: ControlPlaneApi,
        listening: socket.socket,
        *,
        ids: bool,
        queue_bytes_max: int = protocol.QUEUE_BYTES_MAX,
    ) -> None:
        """`ids`: workers send the token ids of prompts in addition to their block keys."""
        self.hub = hub
        self._listening = listening
        self._ids = ids
        self.queue_bytes_max = queue_bytes_max
        self.links: set[WorkerConnection] = set()
        self.empty = asyncio.Event()  # no worker is connected
        self.empty.set()
        self._number = secrets.randbits(63)
        self.view = protocol.frame([])
        self._spreading: asyncio.Handle | None = None
        self.counted: Counter[str] = Counter()  # totals and levels of all workers
        # templates received since the hub last collected them, by worker
        self.templates_heard: dict[str, list[Template]] = {}

    async def __aenter__(self) -> Self:
        """Begin to serve. The first message to each worker is the view."""
        loop = asyncio.get_running_loop()
        self.view = self._view()
        self._server = await loop.create_unix_server(
            lambda: WorkerConnection(self), sock=self._listening, backlog=BACKLOG
        )
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections. Workers then place by the ring."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        self._server.close()
        for link in list(self.links):
            link.transport.abort()
        await self.empty.wait()

    @property
    def in_flight(self) -> int:
        """Requests in progress at all workers."""
        return sum(link.in_flight for link in self.links)

    def counters(self) -> Mapping[str, int]:
        """Return the totals that all workers have counted."""
        return self.counted

    def templates(self) -> Mapping[str, Iterable[Template]]:
        """Return templates that workers have sent since the last call, by worker."""
        heard, self.templates_heard = self.templates_heard, {}
        return heard

    def on_replica_unreachable(self, replica: str) -> None:
        """Notify workers of a replica with a closed port: they end requests that wait for it, and get the new view."""
        for link in self.links:
            link.send(protocol.UnreachableNotice(replica))
            link.flush()
        self._broadcast_view()

    def on_replica_stalled(self, replica: str) -> None:
        """Notify workers of a stalled replica, which accepts and does not answer. They retry requests that wait for it
        on another replica."""
        for link in self.links:
            link.send(protocol.StalledNotice(replica))
            link.flush()

    def on_replicas_progress(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Notify workers of replicas at work, so that they do not cut silent streams of these replicas."""
        for link in self.links:
            link.send(protocol.Working([*moving], [*uncounted]))
            link.flush()

    def on_replica_removed(self, replica: str) -> None:
        """Notify workers of a replica that has left."""
        for link in self.links:
            link.send(protocol.RemovedNotice(replica))
            link.flush()

    def on_replica_ready(self, replica: str) -> None:
        """Send the new view at the end of this iteration of the event loop, because a replica is ready."""
        if self._spreading is None:
            self._spreading = asyncio.get_running_loop().call_soon(self._broadcast_view)

    async def _look(self) -> None:
        while True:
            took_s = -time.monotonic()
            self._broadcast_view()
            took_s += time.monotonic()
            await asyncio.sleep(max(VIEW_S, took_s / VIEW_PART_MAX))

    def _broadcast_view(self) -> None:
        self._spreading = None
        view = self._view()
        if view != self.view:
            self.view = view
            for link in self.links:
                link.write(view)
        levels = self.hub.placer.admission.rate_levels(changed=True)
        for link in self.links if levels else ():
            link.send(protocol.RatesLeft(levels))
            link.flush()

    def _view(self) -> bytes:
        router, placer = self.hub.router, self.hub.placer
        try:
            default = placer.resolve(None)
        except (NoReplicaReady, UnknownModel):
            default = None
        ready = {member.id: tuple(sorted(member.models)) for member in router.usable()}
        served = sorted({model for models in ready.values() for model in models})
        all_models = {model for member in router.members for model in member.models}
        tokens = {model: view for model in served if (view := placer.tokenization_spec(model)) is not None}
        unready = tuple(sorted(all_models.difference(served)))
        rows: dict[str, list[ServedModel]] = {}
        for member in router.members:
            for model in member.models.values():
                rows.setdefault(model.name, []).append(model)
        engines = {model: tuple(sorted({row.owned_by for row in rows[model]})) for model in sorted(rows)}
        names = dict(router.models.names.others)
        standing = router.models.readiness_summary()
        contexts = {model: longest_context(rows[model]) for model in engines}
        said = protocol.ReplicaView(
            list(ready.items()), unready, default, tokens, self._ids, engines, names, standing, contexts
        )
        said.hub = self._number
        said.parents = {model: row.parent for model in engines for row in rows[model] if row.parent}
        said.expected, said.adapting = router.models.expected.bases(), tuple(router.models.expected.list_adaptable())
        said.prefills = tuple(member.id for member in router.usable() if member.replica.role is Role.PREFILL)
        said.disagg_only = tuple(member.id for member in router.usable() if not router.takes_whole(member))
        return protocol.frame([said])


class WorkerConnection(asyncio.Protocol):
    """One worker's connection."""

    transport: asyncio.Transport

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._hub = server.hub
        self._placer = server.hub.placer
        self._router = server.hub.router
        self._frames = protocol.Frames()
        self._leases: dict[int, Lease] = {}
        self._waiting: dict[int, asyncio.Task[None]] = {}  # placements that wait for a KV event
        self._queued: dict[int, Ticket] = {}
        self._receipts: OrderedDict[int, Receipt] = OrderedDict()
        self._out: list[protocol.FromHub] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_flight = 0
        self._levels = dict.fromkeys(LEVELS, 0)  # such as open connections of its clients
        self.worker = -1
        self._handlers: dict[type, Callable[[Any], None]] = {
            protocol.Hello: self._hello,
            protocol.WantLease: self._place,
            protocol.AdoptLease: self._adopt,
            protocol.FirstToken: self._first_token,
            protocol.Prefilled: self._finish_prefill,
            protocol.Finish: self._finish,
            protocol.Report: self._report,
            protocol.ReplicaRefused: lambda said: self._placer.report_connection_refused(said.replica),
            protocol.ResponseMade: lambda said: self._placer.register_response_owner(
                said.response_id, said.replica, said.tenant
            ),
            protocol.AttemptFailed: lambda said: self._placer.count_attempt_failure(said.replica, said.kind),
            protocol.SourceStalled: lambda said: self._placer.report_pull_timeout(said.source),
            protocol.ModelLacked: lambda said: self._placer.lacks(said.replica, said.model),
            protocol.TransferFailedNotice: lambda said: self._placer.report_pair_failure(said.prefill, said.decode),
            protocol.ProgressNotice: lambda said: self._placer.note_progress(said.replica),
            protocol.Cooldown: lambda said: self._placer.set_cooldown(said.replica, said.for_s, full=said.full),
            protocol.FigureCounts: self._counts,
            protocol.PageWanted: self._page,
            protocol.TemplatesSeen: self._templates,
            protocol.RateSpent: self._rate_spent,
            protocol.RequestShed: lambda said: self._placer.admission.count_shed(said.code, said.priority),
        }

    # -- connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the view as the first message."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport has the methods, but is no subclass
        self._server.links.add(self)
        self._server.empty.clear()
        self.write(self._server.view)
        if levels := self._placer.admission.rate_levels(changed=False):
            self.write(protocol.frame([protocol.RatesLeft(levels)]))

    def data_received(self, data: bytes) -> None:
        """Process the worker's messages, and answer in one frame."""
        try:
            for body in self._frames.feed(data):
                batch = protocol.batch_of(body)
                self.in_flight = batch.in_flight
                for message in batch.messages:
                    self._handlers[type(message)](message)
        except protocol.WireError as error:
            fields = {"worker": self.worker, "why": str(error)}
            log.error("a worker is not understood", extra={"event": "worker_not_understood", "fields": fields})  # noqa: TRY400 - no trace
            self.transport.abort()
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Return the worker's leases: all its clients have left."""
        self._server.links.discard(self)
        if not self._server.links:
            self._server.empty.set()
        for task in [*self._waiting.values(), *self._tasks]:
            task.cancel()
        for ticket in self._queued.values():  # tickets go first: a returned lease could place one
            self._placer.admission.cancel(ticket)
        self._queued.clear()
        self._server.counted.subtract(self._levels)
        now_s = time.monotonic()
        for lease in self._leases.values():
            self._placer.finish(lease, LEFT, now_s)
        fields = {"worker": self.worker, "leases": len(self._leases)}
        log.log(
            logging.WARNING if self._leases else logging.INFO,
            "a worker left",
            extra={"event": "worker_left", "fields": fields},
        )
        self._leases.clear()

    def send(self, message: protocol.FromHub) -> None:
        """Send with the next frame."""
        self._out.append(message)

    def flush(self) -> None:
        """Send the frame."""
        if self._out:
            out, self._out = self._out, []
            self.write(protocol.frame(out))

    def write(self, frame: bytes) -> None:
        """Send a whole frame. A worker that leaves too much unread is disconnected."""
        if self.transport.is_closing():
            return
        self.transport.write(frame)
        if self.transport.get_write_buffer_size() > self._server.queue_bytes_max:
            self.transport.abort()

    # -- messages ------------------------------------------------------------------------------------------------

    def _hello(self, hello: protocol.Hello) -> None:
        self.worker = hello.worker
        log.info(
            "a worker joined", extra={"event": "worker_joined", "fields": {"worker": hello.worker, "pid": hello.pid}}
        )

    def _place(self, place: protocol.WantLease) -> None:
        if len(self._leases) + len(self._queued) >= LEASES_MAX or place.id in self._leases or place.id in self._queued:
            raise protocol.WireError(f"placement {place.id}: too many leases, or one of that name")
        wanted, exclude = codec.wanted_of(place), frozenset(place.exclude)
        if wanted.response_id or (self._placer.events_pending(wanted) and not exclude):
            task = asyncio.create_task(self._place_later(place.id, wanted, exclude))
            self._waiting[place.id] = task
            task.add_done_callback(lambda task: self._on_wait_done(place.id, task))
            return
        self._ask(place.id, wanted, exclude)

    async def _place_later(self, id_: int, wanted: PlacementRequest, exclude: frozenset[str]) -> None:
        if wanted.response_id:  # another worker's message about it may already be in the buffer: read that first
            await asyncio.sleep(0)
            if not self._placer.owners.knows(wanted.response_id):
                await self._placer.wait_for_response_owner(wanted.response_id)
        if not exclude:
            await self._placer.wait_for_events(wanted)
        self._ask(id_, wanted, exclude)

    def _ask(self, id_: int, wanted: PlacementRequest, exclude: frozenset[str]) -> None:
        """Answer the placement, or report that it waits in the queue."""

        def answered(answer: Lease | Exception) -> None:
            self._queued.pop(id_, None)
            self._answer(id_, answer)
            self.flush()

        try:
            answer = self._placer.ask(wanted, exclude, answered)
        except Exception as error:  # the worker must get an answer after any error
            self._answer(id_, error)
            return
        if isinstance(answer, Ticket):
            self._queued[id_] = answer
            self.send(protocol.Queued(id_))
        else:
            self._answer(id_, answer)

    def _answer(self, id_: int, answer: Lease | Exception) -> None:
        if isinstance(answer, Lease):
            self._send_placement(id_, answer)
        elif isinstance(answer, NoReplicaReady):
            self.send(protocol.Unplaced(id_, failed=False))
        elif isinstance(answer, Shed):
            self.send(protocol.Unplaced(id_, failed=False, shed=(answer.code, str(answer), answer.retry_after_s)))
        elif isinstance(answer, UnknownResponse):
            self.send(protocol.Unplaced(id_, failed=False, unknown_response=str(answer)))
        else:
            log.error("bug: placing failed inside the hub", exc_info=answer, extra={"event": "bug"})
            self.send(protocol.Unplaced(id_, failed=True))

    def _on_wait_done(self, id_: int, task: asyncio.Task[None]) -> None:
        self._waiting.pop(id_, None)
        if task.cancelled():  # no worker waits for this answer, but it shows that the hub is alive
            self.send(protocol.Unplaced(id_, failed=True))
        self.flush()

    def _send_placement(self, id_: int, lease: Lease) -> None:
        self._leases[id_] = lease
        self.send(codec.placed_of(id_, lease.receipt))

    def _adopt(self, said: protocol.AdoptLease) -> None:
        """Count a lease that the worker opened without the hub, if its replica is known and ready."""
        ask, now_s = RequestSpec(said.model, stream=said.stream), time.monotonic()
        try:
            wanted = PlacementRequest(ask, said.model, None, "", body_tokens=said.prompt_tokens)
            lease = self._router.route(wanted, now_s, only=said.replica)
        except (NoReplicaReady, Shed):
            return
        self._leases[said.id] = lease
        self._placer.admission.register_external_lease(lease)
        if said.first_token_s is not None:
            self._placer.first_token(lease, now_s)

    def _first_token(self, said: protocol.FirstToken) -> None:
        lease = self._leases.get(said.id)
        if lease is not None:
            self._placer.first_token(lease, said.now_s)

    def _finish_prefill(self, said: protocol.Prefilled) -> None:
        lease = self._leases.get(said.id)
        if lease is not None:
            if said.alone and lease.receipt.leg is not None:
                lease.receipt.leg.alone = True
            self._placer.finish_prefill(lease, codec.prefill_outcome_of(said), said.now_s)

    def _finish(self, said: protocol.Finish) -> None:
        lease = self._leases.pop(said.id, None)
        if lease is None:
            ticket = self._queued.pop(said.id, None)
            if ticket is not None:
                self._placer.admission.cancel(ticket)
            waiting = self._waiting.get(said.id)
            if waiting is not None:
                waiting.cancel()
            return
        self._placer.finish(lease, codec.outcome_of(said), said.now_s)
        self._receipts[said.id] = lease.receipt
        if len(self._receipts) > RECEIPTS_MAX:
            self._receipts.popitem(last=False)

    def _report(self, said: protocol.Report) -> None:
        receipt = self._receipts.pop(said.lease, None) if said.lease is not None else None
        self._hub.observe(codec.record_of(said, receipt))

    def _counts(self, said: protocol.FigureCounts) -> None:
        for name in LEVELS:
            self._levels[name] += said.counts.get(name, 0)
        self._server.counted.update(said.counts)

    def _rate_spent(self, said: protocol.RateSpent) -> None:
        for tenant, (requests, tokens) in said.spent.items():
            self._placer.admission.debit_remote(tenant, requests, tokens)

    def _templates(self, said: protocol.TemplatesSeen) -> None:
        self._server.templates_heard.setdefault(f"worker {self.worker}", []).extend(said.templates)

    def _page(self, said: protocol.PageWanted) -> None:
        async def answer() -> None:
            page = await self._placer.page(
                said.path, RequestPrincipal(*said.owner) if said.owner else None, said.accept
            )
            self.send(protocol.PageAnswer(said.id, (page.status, page.content_type, page.body) if page else None))
            self.flush()

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
