"""The hub's side: places for all workers, keeps their open leases, and represents them as the hub's `Edges`.

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

from router.core.admission.queue import Ticket
from router.core.facts.legs import Role
from router.core.facts.misses import Template
from router.core.facts.placements import Receipt, Shed
from router.core.facts.replicas import ServedModel
from router.core.facts.requests import Ask
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplica, UnknownModel, longest_context
from router.core.placement.router import Router
from router.core.placement.wanted import Wanted
from router.hub.local_placer import LocalPlacer
from router.placer import LEFT, RequestOwner, UnknownResponse
from router.telemetry.process_counts import LEVELS
from router.telemetry.record import RequestRecord
from router.workers import codec, messages

log = logging.getLogger(__name__)

VIEW_S = 0.1  # interval of the checks for changes of the view
VIEW_PART_MAX = 0.01  # part of the hub's time that these checks may take
RECEIPTS_MAX = 4_096  # receipts kept per worker, of ended leases with a report that has not arrived yet
LEASES_MAX = 1 << 17  # open leases per worker: more than a process has sockets
BACKLOG = 64


class ServedHub(Protocol):
    """The part of a hub that the server needs."""

    router: Router
    placer: LocalPlacer

    def observe(self, record: RequestRecord) -> None:
        """Add a request that ended to metrics and `/admin/decisions`. The worker writes its log line."""


class HubServer:
    """Serves workers on a bound unix socket: `async with HubServer(hub, sock) as server`."""

    def __init__(
        self, hub: ServedHub, listening: socket.socket, *, ids: bool, queue_bytes_max: int = messages.QUEUE_BYTES_MAX
    ) -> None:
        """`ids`: workers send the token ids of prompts in addition to their block keys."""
        self.hub = hub
        self._listening = listening
        self._ids = ids
        self.queue_bytes_max = queue_bytes_max
        self.links: set[WorkerLink] = set()
        self.empty = asyncio.Event()  # no worker is connected
        self.empty.set()
        self._number = secrets.randbits(63)
        self.view = messages.frame([])
        self._spreading: asyncio.Handle | None = None
        self.counted: Counter[str] = Counter()  # totals and levels of all workers
        # templates received since the hub last collected them, by worker
        self.templates_heard: dict[str, list[Template]] = {}

    async def __aenter__(self) -> Self:
        """Begin to serve. The first message to each worker is the view."""
        loop = asyncio.get_running_loop()
        self.view = self._view()
        self._server = await loop.create_unix_server(lambda: WorkerLink(self), sock=self._listening, backlog=BACKLOG)
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

    def figures(self) -> Mapping[str, int]:
        """Return the totals that all workers have counted."""
        return self.counted

    def templates(self) -> Mapping[str, Iterable[Template]]:
        """Return templates that workers have sent since the last call, by worker."""
        heard, self.templates_heard = self.templates_heard, {}
        return heard

    def lost(self, replica: str) -> None:
        """Notify workers of a replica with a closed port: they end requests that wait for it, and get the new view."""
        for link in self.links:
            link.say(messages.Lost(replica))
            link.flush()
        self._spread()

    def stuck(self, replica: str) -> None:
        """Notify workers of a stalled replica, which accepts and does not answer. They retry requests that wait for it
        on another replica."""
        for link in self.links:
            link.say(messages.Stuck(replica))
            link.flush()

    def working(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Notify workers of replicas at work, so that they do not cut silent streams of these replicas."""
        for link in self.links:
            link.say(messages.Working([*moving], [*uncounted]))
            link.flush()

    def left(self, replica: str) -> None:
        """Notify workers of a replica that has left."""
        for link in self.links:
            link.say(messages.Left(replica))
            link.flush()

    def ready(self, replica: str) -> None:
        """Send the new view at the end of this iteration of the event loop, because a replica is ready."""
        if self._spreading is None:
            self._spreading = asyncio.get_running_loop().call_soon(self._spread)

    async def _look(self) -> None:
        while True:
            took_s = -time.monotonic()
            self._spread()
            took_s += time.monotonic()
            await asyncio.sleep(max(VIEW_S, took_s / VIEW_PART_MAX))

    def _spread(self) -> None:
        self._spreading = None
        view = self._view()
        if view != self.view:
            self.view = view
            for link in self.links:
                link.write(view)
        levels = self.hub.placer.admission.rate_levels(changed=True)
        for link in self.links if levels else ():
            link.say(messages.RatesLeft(levels))
            link.flush()

    def _view(self) -> bytes:
        router, placer = self.hub.router, self.hub.placer
        try:
            default = placer.resolve(None)
        except (NoReplica, UnknownModel):
            default = None
        ready = {member.id: tuple(sorted(member.models)) for member in router.usable()}
        served = sorted({model for models in ready.values() for model in models})
        all_models = {model for member in router.members for model in member.models}
        tokens = {model: view for model in served if (view := placer.token_view(model)) is not None}
        unready = tuple(sorted(all_models.difference(served)))
        rows: dict[str, list[ServedModel]] = {}
        for member in router.members:
            for model in member.models.values():
                rows.setdefault(model.name, []).append(model)
        engines = {model: tuple(sorted({row.owned_by for row in rows[model]})) for model in sorted(rows)}
        names = dict(router.models.names.others)
        standing = router.models.standing()
        contexts = {model: longest_context(rows[model]) for model in engines}
        said = messages.ReplicaView(
            list(ready.items()), unready, default, tokens, self._ids, engines, names, standing, contexts
        )
        said.hub = self._number
        said.parents = {model: row.parent for model in engines for row in rows[model] if row.parent}
        said.expected, said.adapting = router.models.expected.bases(), tuple(router.models.expected.adapting())
        said.prefills = tuple(member.id for member in router.usable() if member.replica.role is Role.PREFILL)
        said.halves = tuple(member.id for member in router.usable() if not router.takes_whole(member))
        return messages.frame([said])


class WorkerLink(asyncio.Protocol):
    """One worker's connection."""

    transport: asyncio.Transport

    def __init__(self, server: HubServer) -> None:
        self._server = server
        self._hub = server.hub
        self._placer = server.hub.placer
        self._router = server.hub.router
        self._frames = messages.Frames()
        self._leases: dict[int, Lease] = {}
        self._waiting: dict[int, asyncio.Task[None]] = {}  # placements that wait for a KV event
        self._queued: dict[int, Ticket] = {}
        self._receipts: OrderedDict[int, Receipt] = OrderedDict()
        self._out: list[messages.FromHub] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_flight = 0
        self._levels = dict.fromkeys(LEVELS, 0)  # such as open connections of its clients
        self.worker = -1
        self._does: dict[type, Callable[[Any], None]] = {
            messages.Hello: self._hello,
            messages.WantLease: self._place,
            messages.Adopt: self._adopt,
            messages.FirstToken: self._first_token,
            messages.Prefilled: self._prefilled,
            messages.Finish: self._finish,
            messages.Report: self._report,
            messages.ReplicaRefused: lambda said: self._placer.refused(said.replica),
            messages.ResponseMade: lambda said: self._placer.made_response(said.response_id, said.replica, said.tenant),
            messages.AttemptFailed: lambda said: self._placer.failed(said.replica, said.kind),
            messages.SourceStalled: lambda said: self._placer.pull_stalled(said.source),
            messages.ModelLacked: lambda said: self._placer.lacks(said.replica, said.model),
            messages.PairBroke: lambda said: self._placer.pair_broke(said.prefill, said.decode),
            messages.Alive: lambda said: self._placer.alive(said.replica),
            messages.Rest: lambda said: self._placer.rest(said.replica, said.for_s, full=said.full),
            messages.FigureCounts: self._counts,
            messages.PageWanted: self._page,
            messages.TemplatesSeen: self._templates,
            messages.RateSpent: self._rate_spent,
            messages.TurnedAway: lambda said: self._placer.admission.turned_away(said.code, said.priority),
        }

    # -- connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the view as the first message."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport has the methods, but is no subclass
        self._server.links.add(self)
        self._server.empty.clear()
        self.write(self._server.view)
        if levels := self._placer.admission.rate_levels(changed=False):
            self.write(messages.frame([messages.RatesLeft(levels)]))

    def data_received(self, data: bytes) -> None:
        """Process the worker's messages, and answer in one frame."""
        try:
            for body in self._frames.feed(data):
                batch = messages.batch_of(body)
                self.in_flight = batch.in_flight
                for message in batch.messages:
                    self._does[type(message)](message)
        except messages.WireError as error:
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
            self._placer.admission.take_back(ticket)
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

    def say(self, message: messages.FromHub) -> None:
        """Send with the next frame."""
        self._out.append(message)

    def flush(self) -> None:
        """Send the frame."""
        if self._out:
            out, self._out = self._out, []
            self.write(messages.frame(out))

    def write(self, frame: bytes) -> None:
        """Send a whole frame. A worker that leaves too much unread is disconnected."""
        if self.transport.is_closing():
            return
        self.transport.write(frame)
        if self.transport.get_write_buffer_size() > self._server.queue_bytes_max:
            self.transport.abort()

    # -- messages ------------------------------------------------------------------------------------------------

    def _hello(self, hello: messages.Hello) -> None:
        self.worker = hello.worker
        log.info(
            "a worker joined", extra={"event": "worker_joined", "fields": {"worker": hello.worker, "pid": hello.pid}}
        )

    def _place(self, place: messages.WantLease) -> None:
        if len(self._leases) + len(self._queued) >= LEASES_MAX or place.id in self._leases or place.id in self._queued:
            raise messages.WireError(f"placement {place.id}: too many leases, or one of that name")
        wanted, exclude = codec.wanted_of(place), frozenset(place.exclude)
        if wanted.response_id or (self._placer.behind(wanted) and not exclude):
            task = asyncio.create_task(self._place_later(place.id, wanted, exclude))
            self._waiting[place.id] = task
            task.add_done_callback(lambda task: self._waited(place.id, task))
            return
        self._ask(place.id, wanted, exclude)

    async def _place_later(self, id_: int, wanted: Wanted, exclude: frozenset[str]) -> None:
        if wanted.response_id:  # another worker's message about it may already be in the buffer: read that first
            await asyncio.sleep(0)
            if not self._placer.owners.knows(wanted.response_id):
                await self._placer.told(wanted.response_id)
        if not exclude:
            await self._placer.listen(wanted)
        self._ask(id_, wanted, exclude)

    def _ask(self, id_: int, wanted: Wanted, exclude: frozenset[str]) -> None:
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
            self.say(messages.Queued(id_))
        else:
            self._answer(id_, answer)

    def _answer(self, id_: int, answer: Lease | Exception) -> None:
        if isinstance(answer, Lease):
            self._placed(id_, answer)
        elif isinstance(answer, NoReplica):
            self.say(messages.Unplaced(id_, failed=False))
        elif isinstance(answer, Shed):
            self.say(messages.Unplaced(id_, failed=False, shed=(answer.code, str(answer), answer.retry_after_s)))
        elif isinstance(answer, UnknownResponse):
            self.say(messages.Unplaced(id_, failed=False, unknown_response=str(answer)))
        else:
            log.error("bug: placing failed inside the hub", exc_info=answer, extra={"event": "bug"})
            self.say(messages.Unplaced(id_, failed=True))

    def _waited(self, id_: int, task: asyncio.Task[None]) -> None:
        self._waiting.pop(id_, None)
        if task.cancelled():  # no worker waits for this answer, but it shows that the hub is alive
            self.say(messages.Unplaced(id_, failed=True))
        self.flush()

    def _placed(self, id_: int, lease: Lease) -> None:
        self._leases[id_] = lease
        self.say(codec.placed_of(id_, lease.receipt))

    def _adopt(self, said: messages.Adopt) -> None:
        """Count a lease that the worker opened without the hub, if its replica is known and ready."""
        ask, now_s = Ask(said.model, stream=said.stream), time.monotonic()
        try:
            wanted = Wanted(ask, said.model, None, "", body_tokens=said.prompt_tokens)
            lease = self._router.route(wanted, now_s, only=said.replica)
        except (NoReplica, Shed):
            return
        self._leases[said.id] = lease
        self._placer.admission.adopted(lease)
        if said.first_token_s is not None:
            self._placer.first_token(lease, now_s)

    def _first_token(self, said: messages.FirstToken) -> None:
        lease = self._leases.get(said.id)
        if lease is not None:
            self._placer.first_token(lease, said.now_s)

    def _prefilled(self, said: messages.Prefilled) -> None:
        lease = self._leases.get(said.id)
        if lease is not None:
            if said.alone and lease.receipt.leg is not None:
                lease.receipt.leg.alone = True
            self._placer.prefilled(lease, codec.prefill_outcome_of(said), said.now_s)

    def _finish(self, said: messages.Finish) -> None:
        lease = self._leases.pop(said.id, None)
        if lease is None:
            ticket = self._queued.pop(said.id, None)
            if ticket is not None:
                self._placer.admission.take_back(ticket)
            waiting = self._waiting.get(said.id)
            if waiting is not None:
                waiting.cancel()
            return
        self._placer.finish(lease, codec.outcome_of(said), said.now_s)
        self._receipts[said.id] = lease.receipt
        if len(self._receipts) > RECEIPTS_MAX:
            self._receipts.popitem(last=False)

    def _report(self, said: messages.Report) -> None:
        receipt = self._receipts.pop(said.lease, None) if said.lease is not None else None
        self._hub.observe(codec.record_of(said, receipt))

    def _counts(self, said: messages.FigureCounts) -> None:
        for name in LEVELS:
            self._levels[name] += said.counts.get(name, 0)
        self._server.counted.update(said.counts)

    def _rate_spent(self, said: messages.RateSpent) -> None:
        for tenant, (requests, tokens) in said.spent.items():
            self._placer.admission.spent_elsewhere(tenant, requests, tokens)

    def _templates(self, said: messages.TemplatesSeen) -> None:
        self._server.templates_heard.setdefault(f"worker {self.worker}", []).extend(said.templates)

    def _page(self, said: messages.PageWanted) -> None:
        async def answer() -> None:
            page = await self._placer.page(said.path, RequestOwner(*said.owner) if said.owner else None, said.accept)
            self.say(messages.PageAnswer(said.id, (page.status, page.content_type, page.body) if page else None))
            self.flush()

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
