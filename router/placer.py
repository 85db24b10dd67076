"""The seam between what faces clients and what knows the replicas: `Placer` is what an edge asks a hub, `Edges` what a
hub asks its edges.

An edge (listener, proxy, relay: edge/) reads requests and moves bytes; the hub (index, probes, events, metrics: hub/)
knows and decides. In one process the edge calls the hub's Router through `LocalPlacer`, at the price of a function
call. With several workers each is an edge of its own, and all ask one hub over a local socket (workers/), so that N
workers decide as one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.core.facts.misses import Template
from router.core.facts.placements import Ending, Outcome, Receipt
from router.core.facts.requests import Priority
from router.core.placement.wanted import Wanted
from router.telemetry.record import RequestRecord

MODELS = "/v1/models"
REQUESTS = "/v1/warmroute/requests/"  # followed by a request's id
JSON = "application/json"


class Placed(Protocol):
    """A lease, as an edge knows it."""

    @property
    def replica(self) -> str:
        """Id of the replica."""

    @property
    def receipt(self) -> Receipt:
        """What the client is told of the placement."""

    @property
    def first_token_s(self) -> float | None:
        """Monotonic time of the first token; None before it."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """What is needed to turn a model's prompts into token ids."""

    base: str  # the base model's name
    engine: str  # kind of engine, as in /v1/models
    replica: str  # a replica that serves the model, to be asked
    adapter: str  # the LoRA adapter that the name stands for; "" for a base model
    block_tokens: tuple[int, ...]  # block sizes of the replicas whose events are followed


@dataclass(frozen=True, slots=True)
class Page:
    """One of the router's own pages."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """Whoever asks what became of a request of their own."""

    tenant: str | None  # None where the router asks for no keys, and tells nobody apart
    receipts: bool  # whether answers to them carry receipts
    isolated: bool  # whether they may not hear of what others have asked


class Placer(Protocol):
    """What an edge asks a hub. Leases are opaque to the edge: it gives back what `place` returned."""

    def resolve(self, model: str | None) -> str:
        """The model meant. Raises UnknownModel, or NoReplica when nothing is ready."""

    def engines(self, model: str) -> Iterable[str]:
        """Kinds of engines that serve the model."""

    def awaited(self, model: str | None) -> str:
        """The base model that a name, or its absence, stands for, if its replicas may all be gone; "" otherwise."""

    def parent(self, model: str) -> str:
        """The base model of a LoRA adapter; "" for any other name."""

    async def look(self, model: str) -> None:
        """Read from the replicas again what they serve: one may serve this model by now. At most one look a second for
        all requests; it returns in a few seconds at most."""

    def lacks(self, replica: str, model: str) -> None:
        """The replica answered that it does not serve this model, which its list has. "": it may have been that."""

    def context_tokens(self, model: str | None) -> int:
        """The longest context that any replica has for the model."""

    def known_as(self, model: str) -> str:
        """The name that chains of the model begin with. Safe in any thread."""

    def follows(self) -> bool:
        """Whether any prompt is wanted as token ids."""

    def token_view(self, model: str) -> TokenView | None:
        """How to make token ids of the model's prompts; None where they would tell nothing."""

    def charge(self, tenant: str, priority: Priority) -> bool:
        """Take one request of a tenant that has a rate, before its body is read. Returns whether it was taken; if not,
        it is taken when it is placed. Raises Shed when the rate is used up."""

    async def place(self, wanted: Wanted, exclude: frozenset[str]) -> Placed:
        """A lease on a replica that is not excluded; with exclusions the request is a retry. Raises NoReplica, Shed if
        the request is turned away, and UnknownResponse."""

    def stands(self, lease: Any) -> bool:  # noqa: ANN401 - what `place` returned
        """True while the lease's replica has neither left nor been replaced, and discovery calls it ready. Send only
        then."""

    def first_token(self, lease: Any, now_s: float) -> None:  # noqa: ANN401 - likewise
        """The first body event of a stream arrived."""

    def finish(self, lease: Any, outcome: Outcome, now_s: float) -> None:  # noqa: ANN401 - likewise
        """Give a lease back, whatever the end. A second time changes nothing."""

    def refused(self, replica: str) -> None:
        """Nobody listens at the replica: proof that the engine is gone."""

    def alive(self, replica: str) -> None:
        """A further piece of an answer of the replica came."""

    def rest(self, replica: str, for_s: float, *, full: bool = False) -> None:
        """The replica asked to be sent nothing for so many seconds (429 or 503 with Retry-After), at most
        REST_MAX_S. With `full` its queue was full: one request at a time may try it where no other is left."""

    def pull_stalled(self, source: str) -> None:
        """A request that was to bring blocks from this replica got no answer in time: nothing is to be brought from
        there for a while."""

    def prefilled(self, lease: Any, outcome: Outcome, now_s: float) -> None:  # noqa: ANN401 - likewise
        """The prefill leg of this lease ended, well or not: its replica is free of it. A second time changes nothing.
        `finish` ends a prefill leg that is still open as one whose client left."""

    def pair_broke(self, prefill: str, decode: str) -> None:
        """The blocks that the first of these replicas computed did not come to the second one, as far as can be told:
        the two are to take no request in two legs before they have handed one over again."""

    def others_ready(self, tried: frozenset[str]) -> bool:
        """Whether a replica other than these is ready."""

    def ready_one(self) -> str | None:
        """A replica that is ready, the same for as long as it is; None where there is none."""

    def standing(self) -> str:
        """How many replicas are ready, and why the others are not, in words for an operator."""

    def made_response(self, response_id: str, replica: str, tenant: str) -> None:
        """The replica made a stored response for this tenant."""

    def failed(self, replica: str, kind: str) -> None:
        """An attempt failed."""

    def report(self, record: RequestRecord) -> None:
        """A request ended."""

    def page(self, path: str, owner: RequestOwner | None = None, accept: str = "") -> Awaitable[Page | None]:
        """One of the router's own pages on the main listener; None if there is none. Pages below REQUESTS are for the
        `owner` of a request. `accept` is the header in ASCII, which decides the format of `/metrics`."""


class Edges(Protocol):
    """What a hub asks of whoever faces clients: the one edge of this process, or all workers."""

    @property
    def in_flight(self) -> int:
        """Requests being answered."""

    def figures(self) -> Mapping[str, int]:
        """Totals counted outside the hub, under the names of telemetry/process_counts.py."""

    def templates(self) -> Mapping[str, Iterable[Template]]:
        """Templates that are new or changed since the last call, by the source that saw them; "" is this process."""

    def lost(self, replica: str) -> None:
        """Nobody listens at the replica any more."""

    def stuck(self, replica: str) -> None:
        """The replica accepts requests and does not answer."""

    def working(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Replicas that have shown work since the last call, a second or so ago; and the others of those whose engines
        count nothing and are well. Streams that are silent there need not have broken."""

    def left(self, replica: str) -> None:
        """Discovery no longer names the replica, or no longer calls it ready."""

    def ready(self, replica: str) -> None:
        """The replica may be sent requests from now on."""


class NoEdges:
    """Edges before there are any: nothing is counted, and nobody is told."""

    in_flight = 0

    def figures(self) -> Mapping[str, int]:
        """Nothing."""
        return {}

    def templates(self) -> Mapping[str, Iterable[Template]]:
        """None."""
        return {}

    def lost(self, replica: str) -> None:
        """Nobody hears of it."""

    def stuck(self, replica: str) -> None:
        """Nobody hears of it."""

    def working(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Nobody hears of it."""

    def left(self, replica: str) -> None:
        """Nobody hears of it."""

    def ready(self, replica: str) -> None:
        """Nobody hears of it."""


class UnknownResponse(Exception):
    """There is no such stored response, or none that this tenant may see."""


LEFT = Outcome(Ending.CLIENT_LEFT)


def no_model_page(name: str) -> Page:
    """A 404 in the form of the OpenAI API: no replica serves this model."""
    error = {"message": f"The model '{name}' does not exist.", "type": "not_found_error", "param": "model"}
    return json_page({"error": {**error, "code": "model_not_found"}}, status=404)


def json_page(value: Any, status: int = 200) -> Page:  # noqa: ANN401 - anything JSON
    """A page whose body is this value as JSON."""
    return Page(status, JSON, msgspec.json.encode(value))
