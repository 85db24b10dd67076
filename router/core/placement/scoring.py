"""Costs of placing a request on a replica: facts and learned models in, a Candidate out.

Every cost is in milliseconds of waiting, so a policy can add them up. This module measures the terms and the policy
weighs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf

from msgspec import Struct

from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.event_state import StoredPrefix
from router.core.cache_state.prefix_index import Holder, PrefixIndex
from router.core.estimators.reuse import ReuseModel
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.eviction_cost import EvictionCost
from router.core.placement.kv_pressure import kv_pressure
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.prefix_match import PromptMatch, Size
from router.core.prompts.block_keys import BLOCK_BYTES
from router.core.types.placements import Candidate, Confidence, FirstTokenExtras, Pull
from router.core.types.tiers import CPU

PRICE_ALL_BELOW = 16  # at most this many replicas are all priced for every request
# Of more replicas, those with the least work and those that hold most of the prompt are priced.
LEAST_LOADED_COUNT, HOLDERS = 6, 6
SOURCES = 4  # replicas with most of a prompt in CPU memory that are considered as a source of a P2P transfer
ESTIMATE_SLACK = 0.9  # an estimated number of prompt tokens may be too high by a tenth
_ESTIMATED = Confidence.ESTIMATED  # looked up once and not for each replica


class FleetSurvey(Struct, gc=False):
    """Load of the replicas that may take a request."""

    waits_ms: list[float]  # prefill that waits at each replica, with other routers' work, in the replicas' order
    slower: dict[str, float]  # measured slowness of a replica relative to its peers, as a factor
    backlog_ms: float  # mean of `waits_ms`
    median_ms: float  # median of `waits_ms`, the lower of two in the middle
    in_flight: int  # open leases of all replicas


class CostModel:
    """Prices candidates. It reads the Router's state and changes only its own sums (eviction_cost.py)."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, knowledge: EventIndex, reuse: ReuseModel) -> None:
        self._fleet = fleet
        self._index = index
        self._knowledge = knowledge
        self._reuse = reuse
        self._evictions = EvictionCost()

    def forget(self, id_: str) -> None:
        """Drop the sums of a replica that has left."""
        self._evictions.forget(id_)

    def survey(self, members: list[ReplicaState], now_s: float) -> FleetSurvey:
        """Collect the load of every replica that may take a request, cheaply."""
        slower = self._fleet.slowness(now_s)
        waits_ms, sum_ms, in_flight = list[float](), 0.0, 0
        for member in members:
            others = member.others
            wait_ms = member.wait_ms(now_s) if others.waiting_ms else member.queue.pending_ms(now_s)
            if untracked := member.counters.untracked_waiting:
                wait_ms += untracked * member.speeds.mean_work_ms
            if slower and member.id in slower:
                wait_ms *= slower[member.id]
            waits_ms.append(wait_ms)
            sum_ms += wait_ms
            in_flight += len(member.leases) + others.open
        count = len(members)
        median_ms = sorted(waits_ms)[(count - 1) // 2] if sum_ms else 0.0
        return FleetSurvey(waits_ms, slower, sum_ms / count, median_ms, in_flight)

    def shortlist(
        self, members: list[ReplicaState], match: PromptMatch, survey: FleetSurvey, near: Sequence[str]
    ) -> list[int]:
        """Return the positions in `members` of the replicas that can be the cheapest.

        These are the deepest holders of the prompt, the replicas that are `near` (its home, its places on the ring),
        and those with the least work at their own speed. Any other replica holds at most as much as the last group and
        has more work. Of many that hold the same, those with the least work are listed. The policy weighs decoding
        between 0 and the weight of waiting, so replicas with the least work by either weight are listed.
        """
        prompt_tokens, answer, depths = match.size.prompt_tokens, match.answer_tokens, match.depths
        stored, loads = match.stored or {}, list[tuple[float, int]]()
        deepest, longest = list[tuple[int, float, int]](), list[tuple[int, float, int]]()
        prefill, cold_ms, waits_ms, slower = None, 0.0, survey.waits_ms, survey.slower
        for n, member in enumerate(members):
            model, step, others = member.prefill_model, member.step_model, member.others
            streams, context = len(member.leases) + others.open, member.work.context_tokens + others.context_tokens
            if model is not prefill:  # replicas share one model until they have their own
                prefill, cold_ms = model, model.ms(prompt_tokens, 0)
            work_ms = (1 + streams) * cold_ms
            if slower and member.id in slower:
                work_ms *= slower[member.id]
            # Same as StepModel.ms, which would be measurable as a call for every replica.
            step_ms = step.floor_ms + step.per_stream_ms * streams + step.per_context_token_ms * context
            loads.append((waits_ms[n] + answer * step_ms + work_ms, n))
        listed, wanted = set[int](), set(near)
        for load, n in loads:
            id_ = members[n].id
            if id_ in wanted:
                listed.add(n)
            if id_ in depths:
                deepest.append((-depths[id_], load, n))
            if id_ in stored:
                longest.append((-stored[id_].tokens, load, n))
        listed.update(n for _, n in nsmallest(LEAST_LOADED_COUNT, loads))
        listed.update(n for _, _, n in nsmallest(LEAST_LOADED_COUNT, [(waits_ms[n], load, n) for load, n in loads]))
        listed.update(n for _, _, n in nsmallest(HOLDERS, deepest))
        listed.update(n for _, _, n in nsmallest(HOLDERS, longest))
        return sorted(listed)

    def candidates(
        self,
        members: list[ReplicaState],
        waits_ms: Sequence[float],
        slower: dict[str, float],
        match: PromptMatch,
        now_s: float,
    ) -> list[Candidate]:
        """Price each of `members` as a Candidate; `waits_ms` and `slower` are from their FleetSurvey."""
        size, holders, candidates, alone = match.size, self._index.holders, [], self._fleet.is_only_sender
        prompt_tokens, ratio, answer = size.prompt_tokens, size.pool_bytes_per_token, match.answer_tokens
        stored, depths = match.stored, match.depths
        context = prompt_tokens + answer / 2  # mean number of tokens of this answer's stream
        for n, member in enumerate(members):
            id_, said, cached, estimate = member.id, None, 0, 0
            if stored is not None:
                said = stored.get(id_) or self._knowledge.empty(id_)
            if said is not None or id_ in depths:
                if id_ in depths:
                    estimate = self._estimated_tokens(member, size, depths[id_])
                cached = self._cached_tokens(member, size, estimate, said)
            holder, uncached, tiers, tier_tokens = holders[id_], prompt_tokens, None, 0
            # without cached tokens the number is one shared object for all candidates: 28 bytes less for each
            if cached:
                uncached -= cached
            if said is not None and said.tiers:
                tiers = to_load(said, cached)
                tier_tokens = sum(tiers.values())
            free = said.free_tokens if said is not None else None
            known = alone or free is not None
            if free is None:
                free = int((holder.blocks_max - len(holder.owner)) * BLOCK_BYTES / ratio)
            evicted, evicted_ms, again_ms, kv_wait_ms, room_ms = uncached + tier_tokens, 0.0, 0.0, 0.0, 0.0
            if free > 0:
                evicted -= free
            # If another router uses the replica and no events report its cache, its evictions are unknown. Pricing them
            # by our share of the replica's prompts was measured: better below saturation, worse at saturation and
            # above.
            if evicted > 0 and known:
                kept_share = said.kept_share if said is not None else 0.0
                evicted_ms, again_ms = self._evicted_ms(member, holder, evicted, ratio, kept_share, now_s)
            prefill, step, others = member.prefill_model, member.step_model, member.others
            streams, around = len(member.leases) + others.open, member.work.context_tokens + others.context_tokens
            uncached_ms = prefill.ms(uncached, cached)
            if slower and id_ in slower:
                uncached_ms *= slower[id_]
            # All leases that are now open there decode at the same time as this answer for a part of its time.
            beside_ms = step.ms(streams, around + streams * answer / 2)
            own_ms = step.per_stream_ms + step.per_context_token_ms * context
            if member.load.kv_tokens_max:
                kv_wait_ms, room_ms = kv_pressure(member, match, answer * (beside_ms + own_ms))
            candidates.append(
                Candidate(  # arguments by position: by name it takes 0.17 us longer for each replica
                    id_,
                    cached,
                    uncached,
                    waits_ms[n],
                    uncached_ms,
                    evicted_ms,
                    kv_wait_ms,
                    streams,
                    _ESTIMATED if said is None else _grade(said),
                    estimate,
                    again_ms,
                    answer * (beside_ms + own_ms),
                    streams * answer / 2 * own_ms,
                    streams * (uncached_ms - prefill.floor_ms) if uncached_ms > prefill.floor_ms else 0.0,
                )
            )
            if room_ms:
                candidates[-1].room_ms = room_ms
            if tiers or member.own_speed.delay.ms:
                extra_ms = loading_ms(member, tiers, now_s) if tiers else 0.0
                candidates[-1].extras = FirstTokenExtras(tier_tokens, extra_ms, member.own_speed.delay.ms)
        return candidates

    def pull(self, candidate: Candidate, match: PromptMatch, now_s: float) -> Pull | None:
        """Return the P2P transfer to the candidate from the source that gives the earliest first token, or None.

        The replica itself is no source. Replicas of another kind or with another block size are no sources either,
        because their blocks have other names.
        """
        pulls, members = self._fleet.pulls, self._fleet.members
        member, cached, uncached = members[candidate.id], candidate.cached_tokens, candidate.uncached_tokens
        said = (
            match.stored.get(candidate.id) or self._knowledge.empty(candidate.id) if match.stored is not None else None
        )
        if said is None or candidate.id not in pulls.peers:
            return None
        slower = self._fleet.slowness(now_s).get(candidate.id, 1.0)
        block_tokens = said.block_tokens or member.load.block_tokens or 0
        prefill, best, best_ms = member.prefill_model, None, inf
        for source in (match.sources or ())[:SOURCES]:
            id_, there = source.replica, members.get(source.replica)
            if there is None or there is member or there.speeds is not member.speeds or not there.health.fit:
                continue
            if there.breaker.backoff_s:  # requests to it have failed: its breaker is not closed
                continue
            tokens = round_to_blocks(source.tokens, cached + uncached, block_tokens) - cached
            if tokens <= 0 or source.block_tokens != block_tokens:
                continue
            took_ms = pulls.model(id_, member.id, member.speeds.loads).ms(tokens)
            fetch_ms = pulls.pending_ms(id_, member.id, now_s) + took_ms
            left_ms = slower * prefill.ms(uncached - tokens, cached + tokens)
            if fetch_ms + left_ms < best_ms:
                best_ms = fetch_ms + left_ms
                stalled_ms = candidate.in_flight * max(0.0, left_ms - prefill.floor_ms)
                best = Pull(id_, pulls.peers[id_].address, tokens, fetch_ms, left_ms, stalled_ms)
        return best

    def holders_outside(self, asked: list[ReplicaState], match: PromptMatch) -> dict[str, int]:
        """Return the prompt's tokens that each replica outside of `asked` (the members that may take the request) is
        estimated to hold."""
        members, size, depths, stored = self._fleet.members, match.size, match.depths, match.stored
        if len(asked) == len(members):
            return {}
        found = {}
        for id_ in (depths.keys() | (stored or {}).keys()) - {member.id for member in asked}:
            if (member := members.get(id_)) is not None:
                depth = depths.get(id_, 0)
                estimate = self._estimated_tokens(member, size, depth) if depth else 0
                said = None if stored is None else stored.get(id_) or self._knowledge.empty(id_)
                if tokens := self._cached_tokens(member, size, estimate, said):
                    found[id_] = tokens
        return found

    def _cached_tokens(self, member: ReplicaState, size: Size, estimate: int, said: StoredPrefix | None) -> int:
        """Return the cached tokens. The events (`said`) decide if they are exact. Otherwise it is the larger of the
        confirmed events and our estimate."""
        if member.load.prefix_caching is False:
            return 0
        known = 0
        if said is not None:
            if said.tokens:
                known = round_to_blocks(
                    said.tokens, size.prompt_tokens, said.block_tokens, whole=said.whole, dropped=said.dropped
                )
            if said.grade is Confidence.EXACT or said.doubted:
                return known
            estimate -= said.dropped  # a negative value counts as 0, because `known` is at least 0
        elif self._knowledge.is_suspended(member.id):
            return 0
        return max(known, estimate)

    def _estimated_tokens(self, member: ReplicaState, size: Size, depth: int) -> int:
        tokens = int(depth * BLOCK_BYTES / size.bytes_per_token)
        return round_to_blocks(tokens, size.prompt_tokens, member.load.block_tokens or 1)

    def _evicted_ms(
        self,
        member: ReplicaState,
        holder: Holder,
        tokens: float,
        bytes_per_token: float,
        kept_share: float,
        now_s: float,
    ) -> tuple[float, float]:
        """Return (work that is repeated because `tokens` are evicted, work that this repetition evicts), in
        milliseconds.

        Prefill is priced at the middle of a mean prompt, because attention makes late tokens more expensive. Tiers keep
        a part of the evicted tokens, which is loaded again and not computed.
        """
        sums = self._evictions.sums(member.id, member.cache_epoch, holder, self._reuse.reuse_probability(now_s), now_s)
        if sums is None:
            return 0.0, 0.0
        model = member.prefill_model
        all_ms = tokens * (model.per_token_ms + model.per_token_context_ms * member.speeds.mean_prompt_tokens / 2)
        if kept_share:
            all_ms += kept_share * (min(all_ms, reload_ms(member, tokens)) - all_ms)
        asked, turns = sums.compute_shares(tokens * bytes_per_token / BLOCK_BYTES)
        return asked * all_ms, turns * all_ms


def to_load(said: StoredPrefix, cached_tokens: int) -> dict[str, int]:
    """Return the tokens to load from each tier if `cached_tokens` of a prompt count as cached (`round_to_blocks`).
    Tokens are cut off at the end of the prefix, which the slowest tiers are estimated to hold."""
    tiers, left = dict(said.tiers or {}), max(0, cached_tokens - said.gpu_tokens)
    for tier, tokens in tiers.items():
        tiers[tier] = min(tokens, left)
        left -= tiers[tier]
    return {tier: tokens for tier, tokens in tiers.items() if tokens}


def loading_ms(member: ReplicaState, tiers: dict[str, int], now_s: float) -> float:
    """Return the modelled time to load these tokens from each tier, after the loads already running from there."""
    links, fits = member.links, member.speeds.loads
    took_ms = 0.0
    for tier, tokens in tiers.items():
        took_ms += links.pending_ms(tier, now_s) + fits.model(tier, links.get_or_create(tier).fit).ms(tokens)
    return took_ms


def reload_ms(member: ReplicaState, tokens: float) -> float:
    """Return the modelled time to load `tokens` again from the member's first tier, one mean prompt at a time."""
    tier = next((tier for tier, _ in member.links.items()), CPU)
    model = member.speeds.loads.model(tier, member.links.get_or_create(tier).fit)
    return model.per_token_ms * tokens + model.floor_ms * tokens / max(1.0, member.speeds.mean_prompt_tokens)


def filter_by_context(members: list[ReplicaState], wanted: PlacementRequest, prompt_tokens: int) -> list[ReplicaState]:
    """Return the members with a long enough context for the prompt; all of them if the request names no model."""
    model = wanted.model
    if model is None:
        return members
    needed = prompt_tokens * (1.0 if wanted.tokens else ESTIMATE_SLACK)
    return [m for m in members if _context_tokens_max(m, model) >= needed]


def long_enough(members: list[ReplicaState], wanted: PlacementRequest, prompt_tokens: int) -> list[ReplicaState]:
    """Return the members with a long enough context for the prompt, or all members if every context is too short. In
    that case the engine must reject the request."""
    return filter_by_context(members, wanted, prompt_tokens) or members


def _context_tokens_max(member: ReplicaState, model: str) -> float:
    """Return the longest context that the member reports for the model; infinite if it reports none."""
    served = member.models.get(model)
    return inf if served is None or served.max_model_len_tokens is None else served.max_model_len_tokens


def _grade(said: StoredPrefix) -> Confidence:
    """Return the grade of one prediction. It is not exact if events are known to be late."""
    return Confidence.CATCHING_UP if said.behind else said.grade


def round_to_blocks(
    tokens: int, prompt_tokens: int, block_tokens: int, *, whole: bool = False, dropped: int = 0
) -> int:
    """Return the cached tokens as the engine counts them, in whole blocks.

    The prompt's last token is never cached, because the first new token is computed from it (vLLM 0.32 and SGLang 0.5
    alike). The exception is a `whole` prompt that is loaded. The last `dropped` tokens of the matched prefix do not
    count.
    """
    return max(0, min(tokens, prompt_tokens - (not whole)) // max(1, block_tokens) * max(1, block_tokens) - dropped)
