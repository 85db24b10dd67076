"""Whether one replica is to prefill a request that another one decodes, and which two: candidates for both legs, as the
policy is to compare them with the one that it chose for both.

The decode leg's candidates are those of the whole request. To these come, for the prefill leg, replicas that take
nothing else (Role.PREFILL); of many only those that can be the cheapest, as for whole requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from router.core.facts.legs import PrefillLeg
from router.core.facts.placements import Candidate, Market, Split
from router.core.fleet.fleet import Fleet
from router.core.fleet.member import Member
from router.core.placement.candidates import FEW, Pricer, with_context
from router.core.placement.eligible import only_prefill
from router.core.placement.match import PromptMatch
from router.core.placement.policies import Splitting
from router.core.placement.wanted import Wanted


class Splitter:
    """Reads the fleet, and changes nothing. Knows transfers (policies.Pairs)."""

    def __init__(self, fleet: Fleet, pricer: Pricer, policy: Splitting) -> None:
        self._fleet = fleet
        self._pricer = pricer
        self._policy = policy
        self.prefill: list[Candidate] = []  # candidates for the last request's prefill leg

    def split(
        self,
        wanted: Wanted,
        match: PromptMatch,
        market: Market,
        candidates: Sequence[Candidate],
        chosen: Candidate,
        exclude: frozenset[str],
        among: frozenset[str] | None,
        full: Collection[str],
        now_s: float,
    ) -> Split | None:
        """The two legs that are better than having the chosen candidate do both; None for one leg."""
        legs, members = self._fleet.legs, self._fleet.members
        decode = [each for each in candidates if legs.may_decode(members[each.id])]
        if not decode:
            return None
        prefill = [each for each in candidates if legs.may_prefill(members[each.id])]
        must = not legs.takes_whole(members[chosen.id])
        if self._fleet.prefillers:
            known = {each.id for each in prefill}
            more = only_prefill(self._fleet, wanted.model, exclude, among, full, now_s, must=must)
            if match.size.prompt_tokens > self._fleet.context_tokens_min:
                more = with_context(more, wanted, match.size.prompt_tokens)
            prefill += self._candidates([m for m in more if m.id not in known], match, now_s)
        self.prefill = prefill
        split = self._policy.split(market, chosen, prefill, decode, self, must=must) if prefill else None
        if (
            split is not None
            and not must
            and wanted.due_s is not None
            and split.expected_ms > (wanted.due_s - now_s) * 1e3
        ):
            return None  # one leg was chosen to be in time, as far as any is
        return split

    def transfer_ms(self, prefill: Candidate, decode: Candidate) -> float | None:
        """Modelled time to send what the decoding replica lacks of the prompt; None where the two are no pair."""
        first, second = self._fleet.members[prefill.id], self._fleet.members[decode.id]
        if not self._fleet.legs.is_warm(first, second):
            return None
        return self._fleet.legs.model(prefill.id, decode.id, second.speeds.loads).ms(decode.uncached_tokens)

    def leg(self, split: Split) -> PrefillLeg:
        """The prefill leg, for the receipt."""
        first, hand = split.prefill, self._fleet.legs.hands[split.prefill.id]
        waited_ms = max(first.pending_ms, first.kv_wait_ms) + first.loading_ms
        return PrefillLeg(
            first.id, hand.handshake, hand.address, first.cached_tokens, waited_ms, first.uncached_ms, split.transfer_ms
        )

    def _candidates(self, members: list[Member], match: PromptMatch, now_s: float) -> list[Candidate]:
        if not members:
            return []
        survey = self._pricer.survey(members, now_s)
        waits_ms = survey.waits_ms
        if len(members) > FEW:
            listed = self._pricer.shortlist(members, match, survey, ())
            members, waits_ms = [members[n] for n in listed], [waits_ms[n] for n in listed]
        return self._pricer.candidates(members, waits_ms, survey.slower, match, now_s)
