"""Receipts of placements: reason, spill and explanation of one choice."""

from __future__ import annotations

from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.insights.breakdown import Explainer
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import Policy, PullPolicy
from router.core.placement.policies.warm.cost import UNWEIGHTED
from router.core.placement.priced_request import PricedRequest
from router.core.placement.receipts import reason_of, take_pull, trim_candidates
from router.core.placement.scoring import CostModel
from router.core.placement.spill import spill
from router.core.types.placements import (
    Candidate,
    DisaggPlan,
    ExternalKv,
    PlacementReason,
    PolicyDecision,
    Receipt,
)


class ReceiptFactory:
    """Makes receipts of a policy's choices."""

    def __init__(self, fleet: Fleet, pricer: CostModel, policy: Policy, explainer: Explainer | None) -> None:
        """`explainer`: with it receipts contain the reasons of cache misses."""
        self._fleet, self._pricer, self._policy, self._explainer = fleet, pricer, policy, explainer
        self._pulls = policy.pulls if isinstance(policy, PullPolicy) else None

    def make(
        self,
        priced: PricedRequest,
        chosen: Candidate,
        choice: PolicyDecision,
        plan: DisaggPlan | None,
    ) -> tuple[Receipt, str]:
        """Return the receipt, which states why a replica with more of the prompt was not chosen, and the id of that
        replica (or ""). With a plan of two replicas, the prompt is computed by the first one, whatever the other one
        holds."""
        policy, match, candidates = self._policy, priced.matched, priced.candidates
        retry = bool(priced.scope.exclude)
        reason = reason_of(chosen, candidates, tied=choice.tied, retry=retry, cache_aware=policy.cache_aware)
        few, holder, computing = trim_candidates(candidates, chosen), "", chosen
        if plan is not None:
            computing, reason = plan.prefill, reason if reason is PlacementReason.RETRY else PlacementReason.SPLIT
        tokens, cached = match.size.prompt_tokens, computing.cached_tokens
        receipt = Receipt(chosen.id, policy.name, reason, computing.grade, tokens, cached, few)
        receipt.rule, receipt.pricing = choice.rule, choice.pricing
        receipt.weighed = priced.market.replicas
        if match.depths or match.stored:
            holder = self._note_spill(receipt, priced, computing)
        if chosen.tier_tokens and plan is None:
            receipt.brought = ExternalKv(chosen.tier_tokens)
        return receipt, holder

    def _note_spill(self, receipt: Receipt, priced: PricedRequest, computing: Candidate) -> str:
        """Add the spill to a receipt. Returns the holder of more of the prompt; "" if there is none."""
        elsewhere, candidates = self._pricer.holders_outside(priced.members, priced.matched), priced.candidates
        if priced.beside:
            candidates = [*candidates, *priced.beside]
            elsewhere = {id_: n for id_, n in elsewhere.items() if all(id_ != c.id for c in candidates)}
        found = spill(
            computing,
            candidates,
            receipt.reason,
            receipt.pricing or UNWEIGHTED,
            elsewhere=elsewhere,
            exclude=priced.scope.exclude,
            full=priced.scope.full,
            role=self._fleet.prefillers.keys(),
        )
        if found is None:
            return ""
        receipt.spill, receipt.spilled_tokens = found.cause.value, found.tokens
        return found.holder

    def add_pull(self, receipt: Receipt, priced: PricedRequest, chosen: Candidate) -> float:
        """Let the chosen replica fetch missing blocks from another replica's memory if the policy does. Returns the
        change of the time to first token, in milliseconds."""
        if self._pulls is None:
            return 0.0
        pull = self._pricer.pull(chosen, priced.matched, priced.now_s)
        if pull is None or not self._pulls(priced.market, chosen, pull):
            return 0.0
        more_ms = pull.fetch_ms + pull.uncached_ms - chosen.uncached_ms
        take_pull(receipt, chosen, pull)
        return more_ms

    def explain(self, receipt: Receipt, priced: PricedRequest, holder: str) -> None:
        """Add the reasons of the prompt's cache misses to a receipt, if there is an explainer."""
        explainer, wanted, match = self._explainer, priced.wanted, priced.matched
        if explainer is None:
            return
        member = self._prefill_member(receipt, self._fleet.members[receipt.replica])
        explainer.explain(
            receipt,
            wanted.chain,
            match.size.bytes_per_token,
            match.depths.get(member.id, 0),
            member.cache_epoch,
            wanted.sighting,
            priced.now_s,
            block_tokens=member.load.block_tokens or 1,
            lives=self._fleet.cache_epochs,
            retry=bool(priced.scope.exclude),
        )
        # a P2P transfer may have supplied the holder's blocks
        if holder and receipt.spill and receipt.miss is not None:
            receipt.miss.held = (holder, receipt.spill)

    def note_shed(self, wanted: PlacementRequest) -> None:
        """Record for the explainer that a request will not be placed; its text may still be stored."""
        if self._explainer is not None and wanted.chain is not None:
            self._explainer.turned_away(wanted.chain)

    def take_back(self, lease: Lease, answering: ReplicaState) -> None:
        """Record for the explainer that the prompt of a lease was never computed."""
        prompt = lease.prompt
        if self._explainer is not None and prompt.end_key is not None:
            epoch = self._prefill_member(lease.receipt, answering).cache_epoch
            self._explainer.take_back(lease.receipt, prompt.keys, prompt.end_key, lease.placed_s, epoch)

    def _prefill_member(self, receipt: Receipt, answering: ReplicaState) -> ReplicaState:
        """Return the member that computes the prompt: the answering one, or that of the prefill stage."""
        return self._fleet.members.get(receipt.prefill_replica, answering)
