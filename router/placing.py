"""The seam between what faces clients and what knows the replicas.

An edge (listener, proxy, relay: edge.py) reads requests and moves bytes; the hub (index, probes, events, metrics:
hub.py) knows and decides. In one process the edge calls the hub's Router through `LocalPlacer`, at the price of a
function call. With several workers each is an edge of its own, and all ask one hub over a local socket
(workers/), so that N workers decide as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from router.core.blocks import Chain
from router.core.facts import Ask, Outcome, Priority, Receipt
from router.core.fleet import Lease
from router.core.keys import TokenPrompt
from router.core.routing import Router
from router.tallies import RequestRecord


@dataclass(slots=True)
class Wanted:
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

    def follows(self) -> bool:
        """Whether any prompt is wanted as token ids."""

    def token_view(self, model: str) -> TokenView | None:
        """None where token ids of its prompts would tell nothing."""

    async def place(self, wanted: Wanted, exclude: frozenset[str]) -> Placed:
        """A lease on a replica that is not excluded; with exclusions it is a retry. Raises NoReplica, and Shed when it
        is turned away."""

    def first_token(self, lease: Any, now_s: float) -> None:  # noqa: ANN401 - what `place` returned
        """The first body event of a stream arrived."""

    def finish(self, lease: Any, outcome: Outcome, now_s: float) -> None:  # noqa: ANN401 - likewise
        """Give a lease back, whatever the end. A second time changes nothing."""

    def refused(self, replica: str) -> None:
        """Nobody listens there any more: proof that the engine is gone."""

    def others_ready(self, tried: frozenset[str]) -> bool:
        """Whether a replica is ready that is not among these."""

    def made_response(self, response_id: str, replica: str) -> None:
        """The replica made a stored response."""

    def failed(self, replica: str, kind: str) -> None:
        """An attempt failed."""

    def report(self, record: RequestRecord) -> None:
        """A request ended."""

    def page(self, path: str) -> Awaitable[Page | None]:
        """One of the router's own pages on the main listener; None where there is none."""


# What an edge of another process counts for the hub's metrics, by name.
HUB_LOST = "hub_lost"  # placements without the hub
LINES_DROPPED = "lines_dropped"  # of its log
CONNECTIONS = "connections"  # of clients, open
CLOSED = "closed:"  # and one of patience.REASONS: connections of clients that we closed
PROMPTS = "prompts:"  # and an outcome: prompts on their way to token ids


class ResponseOwners:
    """Which replica made which stored response; bounded, oldest forgotten first."""

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._owners: dict[str, str] = {}

    def learn(self, response_id: str, replica: str) -> None:
        """Remember it."""
        self._owners[response_id] = replica
        if len(self._owners) > self._ids_max:
            del self._owners[next(iter(self._owners))]

    def owner(self, response_id: str | None) -> str | None:
        """The replica, if it is remembered."""
        return self._owners.get(response_id) if response_id else None


LISTEN_S = 0.001


class LocalPlacer:
    """Places by the Router in this process."""

    def __init__(
        self,
        router: Router,
        *,
        clock: Callable[[], float],
        event_wait_s: float,
        response_ids_max: int,
        observe: Callable[[RequestRecord], None],
        failed: Callable[[str, str], None],
        refused: Callable[[str], None],
        page: Callable[[str], Awaitable[Page | None]],
    ) -> None:
        self._router = router
        self._clock = clock
        self._event_wait_s = event_wait_s
        self.owners = ResponseOwners(response_ids_max)
        self.resolve = router.models.resolve
        self.first_token = router.first_token
        self.finish = router.finish
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
        """See Placer. An answer may be here before the event of its last block, and the next request right behind it:
        the event is waited for, but not for long."""
        if wanted.tokens is not None and not exclude:
            until_s = self._clock() + self._event_wait_s
            while self.behind(wanted) and self._clock() < until_s:  # noqa: ASYNC110 - rare, short
                await asyncio.sleep(LISTEN_S)
        return self.place_now(wanted, exclude)

    def behind(self, wanted: Wanted) -> bool:
        """Whether events that bear on this prompt are known to be on their way."""
        return wanted.tokens is not None and self._router.knowledge.behind(wanted.tokens, self._clock())

    def place_now(self, wanted: Wanted, exclude: frozenset[str]) -> Lease:
        """Place, whatever is on its way. Raises NoReplica."""
        return self._router.route(
            wanted.ask,
            wanted.model,
            wanted.chain,
            self._clock(),
            ring_key=wanted.ring_key,
            tokens=wanted.tokens,
            body_tokens=wanted.body_tokens,
            exclude=exclude,
            only=self.owners.owner(wanted.response_id),
        )

    def others_ready(self, tried: frozenset[str]) -> bool:
        """See Placer."""
        return any(member.id not in tried for member in self._router.fleet.ready())
