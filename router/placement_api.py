"""Interface between data plane and control plane: frontends call `PlacementService`, the control plane calls
`Frontends`.

A frontend (listener, proxy, relay: proxy/) reads requests and relays bytes. The control plane (index, probes, events,
metrics: control/) keeps the state of replicas and decides. A frontend calls its Router through `LocalPlacementService`,
at the cost of a function call. Tests of frontends place by services of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router.core.placement.placement_request import PlacementRequest
from router.core.types.cache_misses import Template
from router.core.types.placements import EndReason, Outcome, Receipt
from router.core.types.requests import Priority
from router.telemetry.request_record import RequestRecord

MODELS = "/v1/models"
REQUESTS = "/v1/warmroute/requests/"  # followed by a request's id
JSON = "application/json"


class LeaseHandle(Protocol):
    """A lease, as a frontend knows it."""

    @property
    def replica(self) -> str:
        """Id of the replica."""

    @property
    def receipt(self) -> Receipt:
        """Description of the placement for the client."""

    @property
    def first_token_s(self) -> float | None:
        """Monotonic time of the first token; None before it."""


@dataclass(frozen=True, slots=True)
class TokenizationSpec:
    """Data needed to turn a model's prompts into token ids."""

    base: str  # the base model's name
    engine: str  # kind of engine, as in /v1/models
    replica: str  # a replica that serves the model, for tokenize requests
    adapter: str  # the LoRA adapter that the name stands for; "" for a base model
    block_tokens: tuple[int, ...]  # block sizes of the replicas that publish followed events


@dataclass(frozen=True, slots=True)
class HttpPage:
    """One of the router's own pages."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class RequestPrincipal:
    """Caller that reads the record of one of its requests."""

    tenant: str | None  # None if the router requires no keys, and cannot identify callers
    receipts: bool  # True if answers to its requests carry receipts
    isolated: bool  # True if it must not learn about other callers' requests


class PlacementService(Protocol):
    """Operations of the control plane for frontends. Leases are opaque to a frontend: it returns the object from
    `place`."""

    def resolve(self, model: str | None) -> str:
        """Return the model meant. Raises UnknownModel, or NoReplicaReady if no replica is ready."""

    def engines(self, model: str) -> Iterable[str]:
        """Return the kinds of engines that serve the model."""

    def find_expected_base(self, model: str | None) -> str:
        """Return the base model of a name, or of a missing name, if its replicas may all be gone; "" otherwise."""

    def parent(self, model: str) -> str:
        """Return the base model of a LoRA adapter; "" for any other name."""

    async def look(self, model: str) -> None:
        """Read the model lists of the replicas again: one may serve this model by now. All requests together cause at
        most one read a second. It returns in a few seconds at most."""

    def lacks(self, replica: str, model: str) -> None:
        """Record that the replica answered that it does not serve this model, which its list has. "" stands for a 404
        of unknown cause, which may be a missing model."""

    def context_tokens(self, model: str | None) -> int:
        """Return the longest context that any replica has for the model."""

    def cache_identity(self, model: str) -> str:
        """Return the name with which chains of the model begin. Safe in any thread."""

    def wants_token_ids(self) -> bool:
        """True if any prompt is wanted as token ids."""

    def tokenization_spec(self, model: str) -> TokenizationSpec | None:
        """Return the data needed to turn the model's prompts into token ids; None if they would not help placement."""

    def reserve_rate(self, tenant: str, priority: Priority) -> bool:
        """Charge one request to a tenant that has a rate, before its body is read. Returns True if it was charged; if
        not, it is charged when it is placed. Raises Shed if the rate is used up."""

    async def place(self, wanted: PlacementRequest, exclude: frozenset[str]) -> LeaseHandle:
        """Return a lease on a replica that is not excluded; with exclusions the request is a retry. Raises
        NoReplicaReady, Shed if the request is turned away, and UnknownResponse."""

    def is_valid(self, lease: Any) -> bool:  # noqa: ANN401 - what `place` returned
        """True while the lease's replica has neither left nor been replaced, and discovery reports it ready. A request
        may only be sent then."""

    def first_token(self, lease: Any, now_s: float) -> None:  # noqa: ANN401 - as above
        """Record the first body event of a stream."""

    def finish(self, lease: Any, outcome: Outcome, now_s: float) -> None:  # noqa: ANN401 - as above
        """Return a lease, with any outcome. A second call changes nothing."""

    def report_connection_refused(self, replica: str) -> None:
        """Report a refused connection: proof that the engine is gone."""

    def note_progress(self, replica: str) -> None:
        """Report a further part of an answer of the replica."""

    def set_cooldown(self, replica: str, for_s: float, *, full: bool = False) -> None:
        """Put a replica in cooldown for `for_s`, at most REST_MAX_S. The replica requested that (429 or 503 with
        Retry-After). With `full` its queue was full: one request at a time may try it if no other replica is left."""

    def report_pull_timeout(self, source: str) -> None:
        """Report that a P2P KV transfer from this replica got no answer in time. During a cooldown it is not used as a
        source."""

    def finish_prefill(self, lease: Any, outcome: Outcome, now_s: float) -> None:  # noqa: ANN401 - as above
        """Record the end of this lease's prefill stage, with any outcome: its replica is free of it. A second call
        changes nothing. `finish` ends a prefill stage that is still open as one with a client that left."""

    def report_pair_failure(self, prefill: str, decode: str) -> None:
        """Report a broken pair: blocks that the first replica computed probably did not arrive at the second one. The
        pair takes no disaggregated request before a new transfer between them succeeds."""

    def has_other_ready(self, tried: frozenset[str], model: str | None = None) -> bool:
        """True if a replica other than these is ready, of those that serve the model if it is known."""

    def ready_one(self) -> str | None:
        """Return a ready replica, the same one while it is ready; None if no replica is ready."""

    def readiness_summary(self, model: str | None) -> tuple[str, str]:
        """Return the model's name, and a text for an operator. The name is "" if the router does not know it. The text
        has the number of ready replicas of the model, or of all models, and the reasons why others are not."""

    def register_response_owner(self, response_id: str, replica: str, tenant: str) -> None:
        """Record a stored response that the replica made for this tenant."""

    def count_attempt_failure(self, replica: str, kind: str) -> None:
        """Count an attempt that failed."""

    def record_request(self, record: RequestRecord) -> None:
        """Report a request that ended."""

    def page(self, path: str, owner: RequestPrincipal | None = None, accept: str = "") -> Awaitable[HttpPage | None]:
        """Return one of the router's own pages on the main listener; None if the page does not exist. Pages below
        REQUESTS are for the `owner` of a request. `accept` is the header in ASCII, which decides the format of
        `/metrics`."""


class Frontends(Protocol):
    """Operations of the frontends of this process for the control plane."""

    @property
    def in_flight(self) -> int:
        """Requests being answered."""

    def counters(self) -> Mapping[str, int]:
        """Return totals counted outside the control plane, under the names of telemetry/process_totals.py."""

    def templates(self) -> Iterable[Template]:
        """Return templates that are new or changed since the last call."""

    def on_replica_unreachable(self, replica: str) -> None:
        """Notify of a refused connection: the replica's port is closed."""

    def on_replica_stalled(self, replica: str) -> None:
        """Notify of a stalled replica, which accepts requests and does not answer."""

    def on_replicas_progress(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Notify of replicas that have shown work since the last call, about a second ago. Also of the healthy ones of
        the other replicas with engines that report no counters. Silent streams of these replicas are not necessarily
        broken."""

    def on_replica_removed(self, replica: str) -> None:
        """Notify of a replica that discovery no longer names, or no longer reports as ready."""

    def on_replica_ready(self, replica: str) -> None:
        """Notify of a replica that may get requests now."""


class UnknownResponse(Exception):
    """The stored response is unknown, or not visible to this tenant."""


LEFT = Outcome(EndReason.CLIENT_LEFT)


def no_model_page(name: str) -> HttpPage:
    """Return a 404 in the form of the OpenAI API: no replica serves this model."""
    error = {"message": f"The model '{name}' does not exist.", "type": "not_found_error", "param": "model"}
    return json_page({"error": {**error, "code": "model_not_found"}}, status=404)


def json_page(value: Any, status: int = 200) -> HttpPage:  # noqa: ANN401 - anything JSON
    """Return a page with this value as JSON."""
    return HttpPage(status, JSON, msgspec.json.encode(value))
