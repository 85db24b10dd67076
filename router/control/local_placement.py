"""Placer of this process: calls the Router after admission."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from router.control.admission_controller import AdmissionController
from router.control.response_owners import ResponseOwners
from router.core.admission.queue import Ticket
from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.types.placements import Outcome
from router.core.types.replicas import REST_MAX_S
from router.core.types.requests import Priority
from router.placement_api import LEFT, HttpPage, RequestPrincipal, TokenizationSpec
from router.telemetry.request_record import RequestRecord

log = logging.getLogger(__name__)

SUMMARY_TTL_S = 0.25  # time for which the text about ready replicas is cached
POLL_INTERVAL_S = 0.001  # interval of the polls for an awaited event


class ResponsePeers(Protocol):
    """Other routers, as far as stored responses are concerned (peer_routers.py)."""

    def publish_response_owner(self, response_id: str, replica: str, tenant: str) -> None:
        """Report a stored response to other routers."""

    def owner_wait_s(self) -> float:
        """Return the time that another router's report of a stored response may take to arrive; 0 if none can
        arrive."""


class LocalPlacementService:
    """Places by the Router in this process."""

    def __init__(
        self,
        router: Router,
        admission: AdmissionController,
        owners: ResponseOwners,
        *,
        clock: Callable[[], float],
        event_wait_s: float,
        observe: Callable[[RequestRecord], None],
        failed: Callable[[str, str], None],
        refused: Callable[[str], None],
        page: Callable[[str, RequestPrincipal | None, str], Awaitable[HttpPage | None]],
        pull_rest_s: float = 60.0,
        look: Callable[[], Awaitable[None]] | None = None,
        reread: Callable[[str], None] | None = None,
    ) -> None:
        """Callbacks and limits:

        - `observe(record)`: called for each request that has ended.
        - `failed(replica, kind)`: called for each attempt that failed.
        - `refused(replica)`: called for each refused connection.
        - `look`: reads again the model lists of all replicas.
        - `reread`: reads again the model list of one replica.
        """
        self._router = router
        self._models = router.models
        self.admission = admission
        self.owners = owners
        self._clock = clock
        self._event_wait_s = event_wait_s
        self._summaries: dict[str, str] = {}  # known model -> readiness of its replicas
        self._summaries_until_s = float("-inf")
        self._look, self._reread = look, reread
        self._observe, self._failed, self._refused = observe, failed, refused
        self._page = page
        self._pull_rest_s = pull_rest_s
        self._peers: ResponsePeers | None = None

    def share_responses(self, peers: ResponsePeers) -> None:
        """Publish stored responses to other routers, and wait for their reports of theirs."""
        self._peers = peers

    def resolve(self, model: str | None) -> str:
        """Return the model meant. Raises UnknownModel, or NoReplicaReady if no replica is ready."""
        return self._models.resolve(model)

    def engines(self, model: str) -> Iterable[str]:
        """Return the kinds of engines that serve the model."""
        return self._models.engines(model)

    def find_expected_base(self, model: str | None) -> str:
        """Return the base model of a name, or of a missing name, if its replicas may all be gone; "" otherwise."""
        return self._models.find_expected_base(model)

    def parent(self, model: str) -> str:
        """Return the base model of a LoRA adapter; "" for any other name."""
        return self._models.parent(model)

    def context_tokens(self, model: str | None) -> int:
        """Return the longest context that any replica has for the model."""
        return self._models.context_tokens(model)

    def cache_identity(self, model: str) -> str:
        """Return the name with which chains of the model begin. Safe in any thread."""
        return self._models.names.cache_identity(model)

    def reserve_rate(self, tenant: str, priority: Priority) -> bool:
        """Charge one request to a tenant that has a rate. Returns True if it was charged. Raises Shed."""
        return self.admission.charge(tenant, priority)

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Record the first body event of a stream."""
        self.admission.first_token(lease, now_s)

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Return a lease, with any outcome. A second call changes nothing."""
        self.admission.finish(lease, outcome, now_s)

    def record_request(self, record: RequestRecord) -> None:
        """Report a request that ended."""
        self._observe(record)

    def count_attempt_failure(self, replica: str, kind: str) -> None:
        """Count an attempt that failed."""
        self._failed(replica, kind)

    def report_connection_refused(self, replica: str) -> None:
        """Report a refused connection: proof that the engine is gone."""
        self._refused(replica)

    def page(self, path: str, owner: RequestPrincipal | None = None, accept: str = "") -> Awaitable[HttpPage | None]:
        """Return one of the router's own pages; None if the page does not exist."""
        return self._page(path, owner, accept)

    async def look(self, model: str) -> None:
        """Read again the model lists of the replicas, unless that was done just now."""
        if self._look is not None:
            await self._look()

    def lacks(self, replica: str, model: str) -> None:
        """Record that the replica does not serve this model, even if its list names it."""
        if self._router.observations.lacks_model(replica, model):
            fields = {"replica": replica, "model": model}
            log.warning("replica does not serve a model of its list", extra={"event": "model_lost", "fields": fields})
        if self._reread is not None:
            self._reread(replica)

    def wants_token_ids(self) -> bool:
        """True if events of any replica are followed, so that prompts are needed as token ids."""
        return self._router.knowledge.follows

    def tokenization_spec(self, model: str) -> TokenizationSpec | None:
        """Return the data needed to turn a model's prompts into token ids; None if token ids would not help
        placement."""
        models = self._router.models
        if not models.follows(model):
            return None
        return TokenizationSpec(
            *models.engine(model), models.adapter(model), tuple(self._router.knowledge.block_sizes())
        )

    async def place(self, request: PlacementRequest, exclude: frozenset[str]) -> Lease:
        """Return a lease on a replica that is not excluded, after a wait for a place if necessary. A cancelled call
        leaves no trace. Raises NoReplicaReady, Shed and UnknownResponse."""
        if request.response_id is not None and not self.owners.knows(request.response_id):
            await self._wait_for_response_owner(request.response_id)
        if request.tokens is not None and self._events_pending(request) and not exclude:
            await self._wait_for_events(request)
        ticket = self.admission.admit(request, exclude, lambda answer: self._on_admission_result(future, answer))
        if not isinstance(ticket, Ticket):
            return ticket
        # `answered` is not called before the next iteration of the event loop
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            self.admission.cancel(ticket)
            if future.done() and not future.cancelled() and future.exception() is None:  # placed at the last moment
                self.finish(future.result(), LEFT, self._clock())
            raise

    def register_response_owner(self, response_id: str, replica: str, tenant: str) -> None:
        """Record that a replica has made a stored response for this tenant."""
        self.owners.learn(response_id, replica, tenant)
        if self._peers is not None:
            self._peers.publish_response_owner(response_id, replica, tenant)

    async def _wait_for_response_owner(self, response_id: str) -> None:
        """Wait for another router's report of a response that is unknown here: its client may be faster than the
        report. Without a report, the request could not be answered anyway."""
        until_s = self._clock() + (self._peers.owner_wait_s() if self._peers is not None else 0.0)
        while self._clock() < until_s and not self.owners.knows(response_id):  # noqa: ASYNC110 - rare, short
            await asyncio.sleep(POLL_INTERVAL_S)

    def is_valid(self, lease: Lease) -> bool:
        """True if the lease's replica has neither left nor been replaced, and discovery reports it ready."""
        member = self._router.fleet.member(lease.replica)
        return member is not None and member.replica.ready and lease.id in member.leases

    def _on_admission_result(self, future: asyncio.Future[Lease], answer: Lease | Exception) -> None:
        if isinstance(answer, Exception):
            if not future.done():
                future.set_exception(answer)
        elif future.done():  # the call was cancelled, and its task has not run since
            self.finish(answer, LEFT, self._clock())
        else:
            future.set_result(answer)

    async def _wait_for_events(self, request: PlacementRequest) -> None:
        """Wait for events that concern the prompt, for at most `event_wait_s`. A response may arrive before the event
        of its last block, and the next request follows it at once."""
        until_s = self._clock() + self._event_wait_s
        while self._events_pending(request) and self._clock() < until_s:  # noqa: ASYNC110 - rare, short
            await asyncio.sleep(POLL_INTERVAL_S)

    def _events_pending(self, request: PlacementRequest) -> bool:
        """True if events that concern this prompt are known to be on their way."""
        return request.tokens is not None and self._router.knowledge.has_pending_events(request.tokens, self._clock())

    def note_progress(self, replica: str) -> None:
        """Count a further part of a response as a sign that its replica is alive."""
        self._router.observations.alive(replica, self._clock())

    def set_cooldown(self, replica: str, for_s: float, *, full: bool = False) -> None:
        """Send a replica no request for `for_s`, at most REST_MAX_S. The replica requested this cooldown, or its queue
        was `full`."""
        if for_s > 0:
            self._router.rest(replica, self._clock() + min(for_s, REST_MAX_S), full=full)

    def report_pull_timeout(self, source: str) -> None:
        """Do not use a replica as a source of P2P KV transfers during a cooldown."""
        self._router.fleet.pulls.rest(source, self._clock() + self._pull_rest_s)

    def finish_prefill(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Record the end of a lease's prefill stage."""
        self.admission.finish_prefill(lease, outcome, now_s)

    def report_pair_failure(self, prefill: str, decode: str) -> None:
        """Require a new warm-up of two replicas before they take another disaggregated request."""
        self._router.disaggregator.pair_broke(prefill, decode, now_s=self._clock())

    def has_other_ready(self, tried: frozenset[str], model: str | None = None) -> bool:
        """True if a replica is ready that is not among these, of those that serve the model if it is known."""
        name = self._models.find_known_name(model)
        members = self._router.fleet.list_serving(name) if name else self._router.fleet.usable()
        return any(member.id not in tried for member in members)

    def ready_one(self) -> str | None:
        """Return the first of the replicas that are ready."""
        return next((member.id for member in self._router.fleet.usable()), None)

    def readiness_summary(self, model: str | None) -> tuple[str, str]:
        """Return the model's name, if known, and a text with the number of ready replicas and the reasons why others
        are not ready. A text is made at most once in SUMMARY_TTL_S, because a fleet that is down may refuse thousands
        of requests a second."""
        now_s, name = self._clock(), self._models.find_known_name(model)
        if now_s >= self._summaries_until_s:
            self._summaries, self._summaries_until_s = {}, now_s + SUMMARY_TTL_S
        if name not in self._summaries:
            self._summaries[name] = self._models.readiness_summary(name)
        return name, self._summaries[name]
