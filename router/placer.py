"""The seam between what faces clients and what knows the replicas.

An edge (listener, proxy, relay: edge.py) reads requests and moves bytes; the hub (index, probes, events, metrics:
hub.py) knows and decides. In one process the edge calls the hub's Router through `LocalPlacer`, at the price of a
function call. With several workers each is an edge of its own, and all ask one hub over a local socket
(workers/), so that N workers decide as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct

from router.hub.admitter import Admitter, Answered
from router.core.admission.windows import Limits, NoLimits
from router.core.prompts.blocks import Chain
from router.core.facts.requests import Ask, Ending, Outcome, Priority, Receipt
from router.core.admission.queue import Pool, Ticket
from router.core.prompts.token_keys import TokenPrompt
from router.core.fleet.member import Lease
from router.core.facts.misses import Sighting
from router.core.placement.router import Router
from router.telemetry.tallies import RequestRecord


class Wanted(Struct, eq=False):  # see core/facts.py
    """A request as far as placing needs it."""

    ask: Ask  # without what was decoded
    model: str | None
    chain: Chain | None
    ring_key: str
    tokens: TokenPrompt | None = None  # where they are known and tell something
    body_tokens: int = 0
    response_id: str | None = None  # belongs to the replica that made it
    tenant: str = ""  # who asks, where that is known
    priority: Priority = Priority.NORMAL
    body_bytes: int = 0
    queued_s: float = 0.0  # waited for a place so far; said by whoever placed it
    sighting: Sighting | None = None  # None without an observatory


class Placed(Protocol):
    """What an edge knows of a lease."""

    @property
    def replica(self) -> str:
        """Id of the replica."""

    @property
    def receipt(self) -> Receipt:
        """What the client is told."""

    @property
    def first_token_s(self) -> float | None:
        """When its first token was seen."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """What turning a model's prompts into token ids takes."""

    base: str  # the base model's name
    engine: str  # kind of engine, as /v1/models says
    replica: str  # one that serves it, to be asked
    adapter: str  # the LoRA adapter that the name stands for; "" for a base model
    block_tokens: tuple[int, ...]  # block sizes of the replicas that are followed


@dataclass(frozen=True, slots=True)
class Page:
    """One of the router's own pages."""

    status: int
    content_type: str
    body: bytes


class Placer(Protocol):
    """Whoever places. Leases are opaque to the edge: it gives back what `place` returned."""

    def resolve(self, model: str | None) -> str:
        """The model meant. Raises UnknownModel, or NoReplica when nothing is ready."""

    def engines(self, model: str) -> Iterable[str]:
        """Kinds of engines that serve it."""

    def known_as(self, model: str) -> str:
        """The name that its chains begin with. In any thread."""

    def follows(self) -> bool:
        """Whether any prompt is wanted as token ids."""

    def token_view(self, model: str) -> TokenView | None:
        """None where token ids of its prompts would tell nothing."""

    async def place(self, wanted: Wanted, exclude: frozenset[str]) -> Placed:
        """A lease on a replica that is not excluded; with exclusions it is a retry. Raises NoReplica, Shed when it is
        turned away, and UnknownResponse."""

    def stands(self, lease: Any) -> bool:  # noqa: ANN401 - what `place` returned
        """Whether its replica is the one that it was placed on still, and by discovery ready: nothing is sent else."""

    def first_token(self, lease: Any, now_s: float) -> None:  # noqa: ANN401 - likewise
        """The first body event of a stream arrived."""

    def finish(self, lease: Any, outcome: Outcome, now_s: float) -> None:  # noqa: ANN401 - likewise
        """Give a lease back, whatever the end. A second time changes nothing."""

    def refused(self, replica: str) -> None:
        """Nobody listens there any more: proof that the engine is gone."""

    def alive(self, replica: str) -> None:
        """Something came of its work: a further piece of an answer."""

    def rest(self, replica: str, for_s: float) -> None:
        """It asked to be sent nothing for so long (429 or 503 with Retry-After); more than REST_MAX_S is that."""

    def others_ready(self, tried: frozenset[str]) -> bool:
        """Whether a replica is ready that is not among these."""

    def made_response(self, response_id: str, replica: str, tenant: str) -> None:
        """The replica made a stored response for this tenant."""

    def failed(self, replica: str, kind: str) -> None:
        """An attempt failed."""

    def report(self, record: RequestRecord) -> None:
        """A request ended."""

    def page(self, path: str) -> Awaitable[Page | None]:
        """One of the router's own pages on the main listener; None where there is none."""


# What an edge of another process counts for the hub's metrics, by name.
HUB_LOST = "hub_lost"  # placements without the hub
LINES_DROPPED = "lines_dropped"  # of its log
SPANS_DROPPED = "spans_dropped"  # of its traces
UNEXPLAINED = "unexplained"  # prompts that were not compared, for want of time
CONNECTIONS = "connections"  # of clients, open
CLOSED = "closed:"  # and one of patience.REASONS: connections of clients that we closed
CPU_MS = "cpu_ms"  # of its process
PROMPTS = "prompts:"  # and an outcome: prompts on their way to token ids


class UnknownResponse(Exception):
    """There is no such stored response, or none that this tenant may know of."""


class ResponseOwners:
    """Which replica made which stored response, and for whom; bounded, oldest forgotten first."""

    def __init__(self, ids_max: int, *, private: bool = False) -> None:
        """`private`: each is its tenant's own, and one that is not remembered is nobody's."""
        self._ids_max = ids_max
        self._private = private
        self._owners: dict[str, tuple[str, str]] = {}

    def learn(self, response_id: str, replica: str, tenant: str) -> None:
        """Remember it. Nobody takes over what is another's."""
        if self._private and self._owners.get(response_id, ("", tenant))[1] != tenant:
            return
        self._owners[response_id] = (replica, tenant)
        if len(self._owners) > self._ids_max:
            del self._owners[next(iter(self._owners))]

    def owner(self, response_id: str | None, tenant: str) -> str | None:
        """The replica, if it is remembered. Raises UnknownResponse."""
        if not response_id:
            return None
        replica, whose = self._owners.get(response_id, (None, None))
        if self._private and whose != tenant:
            raise UnknownResponse(response_id)
        return replica


LISTEN_S = 0.001
REST_MAX_S = 300.0  # an engine may ask for anything, and a clock that is wrong by years must not cost a replica
LEFT = Outcome(Ending.CLIENT_LEFT)


class LocalPlacer:
    """Places by the Router in this process."""

    def __init__(
        self,
        router: Router,
        *,
        clock: Callable[[], float],
        event_wait_s: float,
        response_ids_max: int,
        private_responses: bool = False,
        observe: Callable[[RequestRecord], None],
        failed: Callable[[str, str], None],
        refused: Callable[[str], None],
        page: Callable[[str], Awaitable[Page | None]],
        limits: Limits | None = None,
        load_stale_s: float = 3.0,
        shed: Callable[[str, Priority], None] = lambda *_: None,
    ) -> None:
        """Without `limits` nobody waits for a place; `shed(code, priority)` hears of each request turned away."""
        self._router = router
        self.admission: Admitter[Wanted] = Admitter(
            router, self, limits or NoLimits(), stale_s=load_stale_s, clock=clock, shed=shed
        )
        self._clock = clock
        self._event_wait_s = event_wait_s
        self.owners = ResponseOwners(response_ids_max, private=private_responses)
        self.resolve = router.models.resolve
        self.engines = router.models.engines
        self.known_as = router.models.names.known_as
        self.first_token = router.first_token
        self.finish = self.admission.finish
        self.made_response = self.owners.learn
        self.report = observe
        self.failed = failed
        self.refused = refused
        self.page = page

    def follows(self) -> bool:
        """See Placer."""
        return self._router.knowledge.follows

    def token_view(self, model: str) -> TokenView | None:
        """See Placer."""
        models = self._router.models
        if not models.follows(model):
            return None
        return TokenView(*models.engine(model), models.adapter(model), tuple(self._router.knowledge.block_sizes()))

    async def place(self, wanted: Wanted, exclude: frozenset[str]) -> Lease:
        """See Placer. Whoever no longer wants to wait leaves no trace."""
        if wanted.tokens is not None and self.behind(wanted) and not exclude:
            await self.listen(wanted)
        ticket = self.admission.ask(wanted, exclude, lambda answer: self._answered(future, answer))
        if not isinstance(ticket, Ticket):
            return ticket
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()  # no answer comes before a turn does
        try:
            return await future
        except asyncio.CancelledError:
            self.admission.take_back(ticket)
            if future.done() and not future.cancelled() and future.exception() is None:  # at the last moment
                self.finish(future.result(), LEFT, self._clock())
            raise

    def stands(self, lease: Lease) -> bool:
        """See Placer."""
        member = self._router.fleet.members.get(lease.replica)
        return member is not None and member.replica.ready and lease.id in member.leases

    def _answered(self, future: asyncio.Future[Lease], answer: Lease | Exception) -> None:
        if isinstance(answer, Exception):
            if not future.done():
                future.set_exception(answer)
        elif future.done():  # cancelled, and its task has not run since
            self.finish(answer, LEFT, self._clock())
        else:
            future.set_result(answer)

    async def listen(self, wanted: Wanted) -> None:
        """An answer may be here before the event of its last block, and the next request right behind it: the event is
        waited for, but not for long."""
        until_s = self._clock() + self._event_wait_s
        while self.behind(wanted) and self._clock() < until_s:  # noqa: ASYNC110 - rare, short
            await asyncio.sleep(LISTEN_S)

    def behind(self, wanted: Wanted) -> bool:
        """Whether events that bear on this prompt are known to be on their way."""
        return wanted.tokens is not None and self._router.knowledge.behind(wanted.tokens, self._clock())

    def ask(self, wanted: Wanted, exclude: frozenset[str], answered: Answered) -> Lease | Ticket:
        """Place, whatever is on its way, or wait: see Admitter. Raises NoReplica, Shed."""
        return self.admission.ask(wanted, exclude, answered)

    def route(self, wanted: Wanted, exclude: frozenset[str], full: Collection[str], *, may_hold: bool = False) -> Lease:
        """See admission.Places."""
        only = self.owners.owner(wanted.response_id, wanted.tenant)
        return self._router.route(
            wanted.ask,
            wanted.model,
            wanted.chain,
            self._clock(),
            ring_key=wanted.ring_key,
            tokens=wanted.tokens,
            body_tokens=wanted.body_tokens,
            exclude=exclude,
            only=only,
            full=full,
            sighting=wanted.sighting,
            may_hold=may_hold and only is None,
        )

    def alive(self, replica: str) -> None:
        """See Placer."""
        self._router.alive(replica, self._clock())

    def rest(self, replica: str, for_s: float) -> None:
        """See Placer."""
        if for_s > 0:
            self._router.rest(replica, self._clock() + min(for_s, REST_MAX_S))

    def pool(self, wanted: Wanted) -> Pool:
        """See admission.Places."""
        return wanted.model, self.owners.owner(wanted.response_id, wanted.tenant)

    def prompt_tokens(self, wanted: Wanted) -> int:
        """See admission.Places."""
        prompt = wanted.ask.prompt
        if wanted.tokens is not None and wanted.tokens.tokens:
            return wanted.tokens.tokens
        if prompt is None:
            return wanted.body_tokens
        return self._router.models.tokens(wanted.model or "").tokens_of(prompt)

    def identity(self, wanted: Wanted) -> Hashable | None:
        """See admission.Places: the whole prompt, and whose it is."""
        return (wanted.tenant, wanted.chain.end_key) if wanted.chain is not None else None

    def turned_away(self, wanted: Wanted) -> None:
        """See admission.Places."""
        if self._router.explainer is not None and wanted.chain is not None:
            self._router.explainer.turned_away(wanted.chain)

    def others_ready(self, tried: frozenset[str]) -> bool:
        """See Placer."""
        return any(member.id not in tried for member in self._router.fleet.usable())
