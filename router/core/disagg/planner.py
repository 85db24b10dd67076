"""Decision between one replica and disaggregated prefill, and the choice of the two replicas.

The policy compares the candidates for both stages with the replica that it chose for the whole request. The decode
stage's candidates are those of the whole request. The prefill stage has the same candidates and also the replicas that
do nothing but prefill (Role.PREFILL). Of many replicas only those that can be the cheapest are priced, as for whole
requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.disagg.disagg_policy import DisaggPolicy
from router.core.disagg.pairs import DisaggPairs
from router.core.disagg.prefill_members import filter_prefill_members
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.prefix_match import PromptMatch
from router.core.placement.priced_request import PricedRequest
from router.core.placement.scoring import PRICE_ALL_BELOW, CostModel, FleetSurvey, filter_by_context
from router.core.placement.ttft_feasibility import predicted_ms
from router.core.types.disagg_types import PrefillStage
from router.core.types.placements import Candidate, DisaggPlan

NEAR = 64  # replicas that are examined if none of the best are a pair and two replicas are required


class DisaggPlanner:
    """Reads the fleet and changes nothing. Provides transfer times (policies.Pairs)."""

    def __init__(
        self, fleet: Fleet, fitness: Eligibility, pairs: DisaggPairs, pricer: CostModel, policy: DisaggPolicy
    ) -> None:
        self._fleet = fleet
        self._pairs = pairs
        self._fitness = fitness
        self._pricer = pricer
        self._policy = policy
        self.prefill: list[Candidate] = []  # candidates for the last request's prefill stage

    def split(self, priced: PricedRequest, chosen: Candidate) -> DisaggPlan | None:
        """Return the two replicas that are better than the chosen candidate alone; None for one replica."""
        market, candidates, match, now_s = priced.market, priced.able, priced.matched, priced.now_s
        pairs, members = self._pairs, self._fleet.members
        decode = [each for each in candidates if pairs.may_decode(members[each.id])]
        must = not pairs.serves_whole(members[chosen.id])
        if not decode or not (must or self._policy.may_split(market, chosen, decode)):
            return None
        prefill = [each for each in candidates if pairs.may_prefill(members[each.id])]
        waits_ms = [each.wait_ms for each in prefill]
        more = self._more(priced, {each.id for each in prefill}, must=must) if self._fleet.prefillers else []
        if more:
            survey = self._pricer.survey(more, now_s)
            waits_ms += survey.waits_ms
            prefill += self._candidates(more, survey, match, now_s)
        self.prefill = prefill
        split = self._policy.split(market, chosen, prefill, decode, self, waits_ms=waits_ms, must=must)
        if (
            split is None and must and len(more) > PRICE_ALL_BELOW
        ):  # the cheapest few are not paired with the few that decode
            near = self._find_partners(decode)
            more = [m for m in more if m.id in near]
            if more:
                self.prefill = self._price_all(more, self._pricer.survey(more, now_s), match, now_s)
                split = self._policy.split(market, chosen, self.prefill, decode, self, waits_ms=waits_ms, must=True)
        if split is None or must or priced.left_ms is None:
            return split
        # A single replica was chosen to keep the deadline, if it can.
        late = self.predicted_ms(split) > priced.left_ms >= predicted_ms(chosen, members)
        return None if late else split

    def _more(self, priced: PricedRequest, known: set[str], *, must: bool) -> list[ReplicaState]:
        """Return the members that only prefill, and are not among the `known` candidates."""
        wanted, scope, tokens = priced.wanted, priced.scope, priced.matched.size.prompt_tokens
        among = None if isinstance(scope.only, str) else scope.only
        members, full = self._fleet.members, scope.full
        whole = must and any(self._pairs.serves_whole(members[c.id]) and c.id not in full for c in priced.able)
        more = filter_prefill_members(
            self._fleet,
            self._pairs,
            self._fitness,
            wanted.model,
            scope.exclude,
            among,
            full,
            priced.now_s,
            must=must,
            whole=whole,
        )
        if tokens > self._fleet.context_tokens_min:
            more = filter_by_context(more, wanted, tokens)
        return [m for m in more if m.id not in known]

    def _find_partners(self, decode: Sequence[Candidate]) -> set[str]:
        """Return the ids of replicas that are paired with these candidates, those with the shortest wait first, until
        there are NEAR."""
        near = set[str]()
        for each in sorted(decode, key=lambda c: c.wait_ms):
            near.update(self._pairs.partners(each.id))
            if len(near) >= NEAR:
                break
        return near

    def predicted_ms(self, split: DisaggPlan) -> float:
        """Return the median prediction of the time to first token for a pair."""
        speeds = self._fleet.members[split.decode.id].speeds
        return speeds.first_tokens_split.predict(split.expected_ms)[0]

    def transfer_ms(self, prefill: Candidate, decode: Candidate) -> float | None:
        """Return the modelled time to send the part of the prompt that the decoding replica lacks; None if the two are
        no pair."""
        first, second = self._fleet.members[prefill.id], self._fleet.members[decode.id]
        if not self._pairs.is_warm(first, second):
            return None
        return self._pairs.model(prefill.id, decode.id, second.speeds.loads).ms(decode.uncached_tokens)

    def leg(self, split: DisaggPlan) -> PrefillStage:
        """Return the prefill stage in the form that the receipt contains."""
        first, hand = split.prefill, self._pairs.hands[split.prefill.id]
        waited_ms = first.wait_ms + first.loading_ms
        return PrefillStage(
            first.id, hand.connector, hand.address, first.cached_tokens, waited_ms, first.uncached_ms, split.transfer_ms
        )

    def _candidates(
        self, members: list[ReplicaState], survey: FleetSurvey, match: PromptMatch, now_s: float
    ) -> list[Candidate]:
        """Return priced candidates; of many members those that can be the cheapest."""
        if len(members) <= PRICE_ALL_BELOW:
            return self._price_all(members, survey, match, now_s)
        listed = self._pricer.shortlist(members, match, survey, ())
        waits_ms = [survey.waits_ms[n] for n in listed]
        return self._pricer.candidates([members[n] for n in listed], waits_ms, survey.slower, match, now_s)

    def _price_all(
        self, members: list[ReplicaState], survey: FleetSurvey, match: PromptMatch, now_s: float
    ) -> list[Candidate]:
        return self._pricer.candidates(members, survey.waits_ms, survey.slower, match, now_s)
