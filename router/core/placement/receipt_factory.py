"""Receipts of placements: reason, spill and explanation of one choice."""

from __future__ import annotations

from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.insights.breakdown import Explainer
from router.core.placement.policies import Policy
from router.core.placement.policies.warm.cost import UNWEIGHTED
from router.core.placement.priced_request import PricedRequest
from router.core.placement.receipts import reason_of, trim_candidates
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

    def explain(self, receipt: Receipt, priced: PricedRequest, holder: str) -> None:
        """Add the reasons of the prompt's cache misses to a receipt, if there is an explainer."""
        explainer, wanted, match = self._explainer, priced.wanted, priced.matched
        if explainer is None:
            return
        member = self.prefill_member(receipt, self._fleet.members[receipt.replica])
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

    def prefill_member(self, receipt: Receipt, answering: ReplicaState) -> ReplicaState:
        """Return the member that computes the prompt: the answering one, or that of the prefill stage."""
        return self._fleet.members.get(receipt.prefill_replica, answering)
