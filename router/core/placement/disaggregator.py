"""Interface for requests that two replicas serve together, and the behavior without such requests.

A disaggregator plans (`plan`), opens the leases of a plan (`open`), and ends them (`finish_prefill`, `finish`). The
data plane calls the two replicas (router/proxy/disagg_calls). A request may need places on two replicas, so the
disaggregator also counts free places for admission.

`Disaggregator` itself serves every request by one replica: no code of a KV connector runs unless a subclass is
registered with the Router (core/disagg).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from router.core.fleet.eligibility import Eligibility
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.filters import NOBODY, filter_members
from router.core.placement.lease_factory import LeaseFactory
from router.core.placement.lease_listener import LeaseListener
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import Policy
from router.core.placement.priced_request import PlacementScope, PricedRequest
from router.core.placement.scoring import CostModel
from router.core.types.disagg_types import KvConnector, PairStatus
from router.core.types.placements import Candidate, DisaggPlan, ExternalKv, Outcome, Receipt


class Disaggregator:
    """Serves each request by one replica."""

    def __init__(self, fleet: Fleet, fitness: Eligibility) -> None:
        self._fleet, self._fitness = fleet, fitness

    # -- plan ----------------------------------------------------------------------------------------------------

    def may_plan(self, wanted: PlacementRequest, only: str | frozenset[str] | None = None) -> bool:
        """True if two replicas may serve a request now."""
        return False

    def plan(self, priced: PricedRequest, chosen: Candidate) -> DisaggPlan | None:
        """Return the two replicas that are better than the chosen candidate alone; None for one replica. Raises Shed if
        neither keeps the deadline of a request of low priority."""
        return None

    def narrow(self, priced: PricedRequest, chosen: Candidate) -> PlacementScope | None:
        """Return the scope of another placement if the chosen candidate takes no whole request and there is no plan.
        None: the candidate can serve the request. Raises NoReplicaReady and Shed if no replica can."""
        return None

    def predicted_ms(self, plan: DisaggPlan) -> float:
        """Return the median prediction of a plan's time to first token."""
        return plan.expected_ms

    def external_kv(self, plan: DisaggPlan) -> ExternalKv:
        """Return the blocks that a plan brings to its answering replica, as the receipt contains them."""
        return ExternalKv(plan.prefill.tier_tokens)

    # -- open and finish -----------------------------------------------------------------------------------------

    def open(
        self, priced: PricedRequest, plan: DisaggPlan, receipt: Receipt, watch: LeaseListener | None, now_s: float
    ) -> Lease:
        """Open the leases of a plan. Returns the lease of the replica that answers."""
        raise NotImplementedError

    def first_token(self, member: ReplicaState, lease: Lease, watch: LeaseListener | None, now_s: float) -> None:
        """Record the first body event of a planned request's answer."""

    def finish_prefill(self, lease: Lease, outcome: Outcome, watch: LeaseListener | None, now_s: float) -> None:
        """End the prefill stage of this lease, successful or not. A second call has no effect."""

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> Outcome:
        """End a planned request. Returns the part of the outcome from which the answering replica may be judged."""
        return outcome

    def has_computed_prompt(self, lease: Lease) -> bool:
        """True if another replica has computed the lease's prompt, whatever the outcome of the answer."""
        return False

    def prefill_ms(self, lease: Lease) -> float:
        """Return the expected milliseconds of prefill of a lease's request, on whichever replica."""
        return lease.prefill_ms

    # -- free places ---------------------------------------------------------------------------------------------

    def filter_prefilling(
        self, model: str | None, only: str | frozenset[str] | None, may_split: bool, now_s: float
    ) -> list[ReplicaState]:
        """Return the members that may prefill a request, as `Router.route` would find now, full or not. Raises
        NoReplicaReady and Shed."""
        return self._candidates(model, only, may_split, now_s)

    def has_room(
        self,
        model: str | None,
        only: str | frozenset[str] | None,
        may_split: bool,
        now_s: float,
        busy: Collection[str],
    ) -> bool:
        """True if replicas that can serve the request together or alone are not `busy`. Raises NoReplicaReady and
        Shed."""
        return any(m.id not in busy for m in self._candidates(model, only, may_split, now_s))

    def filter_places(self, members: list[ReplicaState], *, may_split: bool = False) -> list[ReplicaState]:
        """Return those of `members` that answer requests. The list must not be modified."""
        return self._fleet.filter_unsplit(members)

    def _candidates(
        self, model: str | None, only: str | frozenset[str] | None, may_split: bool, now_s: float
    ) -> list[ReplicaState]:
        """Return the members that may answer a request, as `Router.route` would find now, full or not. The list must
        not be modified. Raises NoReplicaReady and Shed."""
        return filter_members(self._fleet, self._fitness, model, NOBODY, only, (), now_s, whole=not may_split)

    # -- pairs ---------------------------------------------------------------------------------------------------

    def set_connector(self, replica: str, connector: KvConnector | None, address: str) -> None:
        """Record a replica's KV connector, and the address at which its blocks are requested."""

    def connector_of(self, replica: str) -> tuple[KvConnector, str, bool] | None:
        """Return a replica's KV connector, its address, and True if it is active now; None if the replica never had
        one."""
        return None

    def pair_counts(self, now_s: float) -> dict[str, dict[str, int]]:
        """Count the pairs of each replica by state."""
        return {}

    def list_pairs(self, pairs_max: int, now_s: float) -> tuple[list[PairStatus], int]:
        """Return pairs for display, and their total number."""
        return [], 0

    def pairs_to_warm(self, now_s: float) -> list[tuple[str, str]]:
        """Return new pairs (prefill, decode), which get no traffic before `pair_warmed`."""
        return []

    def pair_warmed(self, prefill: str, decode: str, *, ok: bool, now_s: float) -> None:
        """Record the result of a pair's warm-up."""

    def pair_broke(self, prefill: str, decode: str, *, now_s: float) -> None:
        """Record that the blocks of a request did not arrive over a pair."""


class DisaggregatorFactory(Protocol):
    """A disaggregator as it is registered with the Router: a class of core/disagg."""

    def __call__(
        self,
        fleet: Fleet,
        fitness: Eligibility,
        pricer: CostModel,
        policy: Policy,
        leases: LeaseFactory,
        first_token: Callable[[Lease, float], None],
        finish: Callable[[Lease, Outcome, float], None],
    ) -> Disaggregator:
        """`first_token` and `finish` are the Router's methods, for the leases of prefill stages."""
