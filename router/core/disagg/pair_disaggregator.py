"""Disaggregator for engines with a KV connector: one replica prefills a prompt, and another one of its pair decodes it.

A request without disaggregated prefill needs a place on one replica that takes whole requests. Other requests can use
such a replica too, or two replicas that are a pair. If no replica takes whole requests (SGLang's servers), a decoding
replica is no place until a prefilling replica of one of its pairs is free. Prompts are prefilled by replicas that take
whole requests, and by replicas that prefill for others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from router.core.disagg.disagg_policy import DisaggPolicy
from router.core.disagg.leases import DisaggLeases
from router.core.disagg.pairs import DisaggPairs
from router.core.disagg.planner import DisaggPlanner
from router.core.disagg.prefill_members import filter_prefill_members, refusal
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.disaggregator import Disaggregator
from router.core.placement.filters import NOBODY
from router.core.placement.lease_factory import LeaseFactory
from router.core.placement.lease_listener import LeaseListener
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import Policy
from router.core.placement.priced_request import PlacementScope, PricedRequest
from router.core.placement.scoring import CostModel
from router.core.placement.ttft_feasibility import predicted_ms, unreachable
from router.core.types.disagg_types import KvConnector, PairStatus
from router.core.types.placements import Candidate, DisaggPlan, ExternalKv, Outcome, Receipt


class PairDisaggregator(Disaggregator):
    """Plans pairs if the policy can (DisaggPolicy), and keeps the open prefill stages."""

    def __init__(
        self,
        fleet: Fleet,
        fitness: Eligibility,
        pricer: CostModel,
        policy: Policy,
        leases: LeaseFactory,
        first_token: Callable[[Lease, float], None],
        finish: Callable[[Lease, Outcome, float], None],
    ) -> None:
        super().__init__(fleet, fitness)
        self.pairs = DisaggPairs(fleet.stage_only)
        self.planner = (
            DisaggPlanner(fleet, fitness, self.pairs, pricer, policy) if isinstance(policy, DisaggPolicy) else None
        )
        self._leases = DisaggLeases(fleet, fitness, self.pairs, leases, first_token, finish)
        fleet.observers.append(self.pairs)
        fleet.waits_for_peer = self._leases.waits_for_peer

    # -- plan ----------------------------------------------------------------------------------------------------

    def may_plan(self, wanted: PlacementRequest, only: str | frozenset[str] | None = None) -> bool:
        """True if a request may use disaggregated prefill and some replicas support it."""
        splits = wanted.may_split and self.planner is not None and bool(self.pairs.hands)
        return splits and not isinstance(only, str)

    def plan(self, priced: PricedRequest, chosen: Candidate) -> DisaggPlan | None:
        """Return the two replicas that are better than the chosen candidate alone; None for one replica. Raises Shed if
        neither keeps the deadline of a request of low priority."""
        planner = self.planner
        if planner is None or priced.scope.whole or not self.may_plan(priced.wanted, priced.scope.only):
            return None
        plan = planner.split(priced, chosen)
        if priced.may_shed and priced.left_ms is not None and priced.able is priced.candidates:
            self._refuse_late(priced.candidates, plan, priced.left_ms)
        if plan is not None:
            priced.beside = [c for c in planner.prefill if c.id in self._fleet.prefillers]
        return plan

    def narrow(self, priced: PricedRequest, chosen: Candidate) -> PlacementScope | None:
        """Return the scope of another placement if the chosen candidate takes no whole request. Raises NoReplicaReady
        and Shed if no replica does and the replicas that are not full are no pair."""
        fleet, scope, wanted = self._fleet, priced.scope, priced.wanted
        if chosen.id not in fleet.stage_only or scope.whole or not self.may_plan(wanted, scope.only):
            return None
        if all(member.id in fleet.stage_only for member in priced.members):
            if scope.full:  # the replicas that are not full may not be paired
                return PlacementScope(scope.exclude, scope.only, (), False)
            among = None if isinstance(scope.only, str) else scope.only
            raise refusal(fleet, self.pairs, wanted.model, scope.exclude, among, priced.now_s)
        return PlacementScope(scope.exclude, scope.only, scope.full, True)

    def _refuse_late(self, candidates: Collection[Candidate], plan: DisaggPlan | None, left_ms: float) -> None:
        """Raise Shed if neither a candidate nor a pair keeps the deadline."""
        soonest_ms = min([predicted_ms(each, self._fleet.members) for each in candidates])
        if plan is not None:
            soonest_ms = min(soonest_ms, self.predicted_ms(plan))
        if soonest_ms > left_ms:
            raise unreachable(soonest_ms, left_ms)

    def predicted_ms(self, plan: DisaggPlan) -> float:
        """Return the median prediction of a pair's time to first token."""
        return self._fleet.members[plan.decode.id].speeds.first_tokens_split.predict(plan.expected_ms)[0]

    def external_kv(self, plan: DisaggPlan) -> ExternalKv:
        """Return the prefill stage and its loads from tiers, as the receipt contains them."""
        leg = self.planner.leg(plan) if self.planner is not None else None
        return ExternalKv(plan.prefill.tier_tokens, None, leg)

    # -- open and finish -----------------------------------------------------------------------------------------

    def open(
        self, priced: PricedRequest, plan: DisaggPlan, receipt: Receipt, watch: LeaseListener | None, now_s: float
    ) -> Lease:
        """Open the leases of both stages. Returns that of the decode stage."""
        return self._leases.open(priced, plan, receipt, watch, now_s)

    def first_token(self, member: ReplicaState, lease: Lease, watch: LeaseListener | None, now_s: float) -> None:
        """Record the first body event of a decode stage's stream."""
        self._leases.first_token(member, lease, watch, now_s)

    def finish_prefill(self, lease: Lease, outcome: Outcome, watch: LeaseListener | None, now_s: float) -> None:
        """End the prefill stage of this decode lease, successful or not. A second call has no effect."""
        self._leases.finish_prefill(lease, outcome, watch, now_s)

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> Outcome:
        """End both stages. Returns the part of the outcome that may be used to learn about the decode stage."""
        return self._leases.finish(lease, outcome, now_s)

    def has_computed_prompt(self, lease: Lease) -> bool:
        """True if the prompt of a decode lease was computed by the prefill stage."""
        return self._leases.has_computed_prompt(lease)

    def prefill_ms(self, lease: Lease) -> float:
        """Return the expected milliseconds of prefill of a request, on the replica that prefills."""
        return self._leases.prefill_ms(lease)

    # -- free places ---------------------------------------------------------------------------------------------

    def filter_prefilling(
        self, model: str | None, only: str | frozenset[str] | None, may_split: bool, now_s: float
    ) -> list[ReplicaState]:
        """Return the members that may prefill a request, as `Router.route` would find now, full or not. Raises
        NoReplicaReady and Shed."""
        members = self._candidates(model, only, may_split, now_s)
        if not may_split or isinstance(only, str):
            return members
        able = [m for m in members if self.pairs.serves_whole(m) or self.pairs.may_prefill(m)]
        return able + self._only_prefill(model, only, now_s)

    def has_room(
        self,
        model: str | None,
        only: str | frozenset[str] | None,
        may_split: bool,
        now_s: float,
        busy: Collection[str],
    ) -> bool:
        """True if a replica that takes the request whole is not `busy`, or two that are a pair. Raises NoReplicaReady
        and Shed."""
        members, pairs = self._candidates(model, only, may_split, now_s), self.pairs
        free = [m for m in members if m.id not in busy]
        if not may_split or isinstance(only, str) or not pairs.hands or any(map(pairs.serves_whole, free)):
            return bool(free)
        prefill = [m for m in members if pairs.may_prefill(m)] + self._only_prefill(model, only, now_s)
        if self._is_pair(prefill, free, busy):
            return True
        if not any(map(pairs.serves_whole, members)) and not self._is_pair(prefill, members, ()):
            raise refusal(self._fleet, pairs, model, NOBODY, only, now_s)
        return False

    def filter_places(self, members: list[ReplicaState], *, may_split: bool = False) -> list[ReplicaState]:
        """Return those of `members` that are places for requests, served whole or decoded after another replica's
        prefill. The list must not be modified."""
        members, stage_only = self._fleet.filter_unsplit(members), self._fleet.stage_only
        if may_split or not stage_only:
            return members
        return [m for m in members if m.id not in stage_only] or members

    def _only_prefill(self, model: str | None, among: frozenset[str] | None, now_s: float) -> list[ReplicaState]:
        if not self._fleet.prefillers:
            return []
        return filter_prefill_members(
            self._fleet, self.pairs, self._fitness, model, NOBODY, among, (), now_s, must=True
        )

    def _is_pair(self, prefill: list[ReplicaState], decode: list[ReplicaState], busy: Collection[str]) -> bool:
        """True if any two of these take traffic as a pair, and the prefilling one is not busy."""
        able = [m for m in decode if self.pairs.may_decode(m)]
        return any(self.pairs.is_warm(first, m) for first in prefill if first.id not in busy for m in able)

    # -- pairs ---------------------------------------------------------------------------------------------------

    def set_connector(self, replica: str, connector: KvConnector | None, address: str) -> None:
        """Record a replica's KV connector, and the address at which its blocks are requested."""
        if replica in self._fleet.members:  # otherwise it left while it was probed
            self.pairs.set_connector(replica, connector, address)

    def connector_of(self, replica: str) -> tuple[KvConnector, str, bool] | None:
        """Return a replica's KV connector, its address, and True if it is active now; None if the replica never had
        one."""
        if (found := self.pairs.connector_of(replica)) is None:
            return None
        hand, now = found
        return hand.connector, hand.address, now

    def pair_counts(self, now_s: float) -> dict[str, dict[str, int]]:
        """Count the pairs of each replica by state."""
        return self.pairs.pair_counts(now_s)

    def list_pairs(self, pairs_max: int, now_s: float) -> tuple[list[PairStatus], int]:
        """Return pairs for display, and their total number."""
        return self.pairs.list_pairs(pairs_max, now_s)

    def pairs_to_warm(self, now_s: float) -> list[tuple[str, str]]:
        """Return new pairs (prefill, decode), which get no traffic before `pair_warmed`."""
        return self.pairs.to_warm(self._fleet.members, now_s) if self.pairs.hands else []

    def pair_warmed(self, prefill: str, decode: str, *, ok: bool, now_s: float) -> None:
        """Record the result of a pair's warm-up."""
        self.pairs.note_warm_up(prefill, decode, now_s, ok=ok)

    def pair_broke(self, prefill: str, decode: str, *, now_s: float) -> None:
        """Record that the blocks of a request did not arrive over a pair."""
        self.pairs.cooldown_pair(self._fleet.members, prefill, decode, now_s)
