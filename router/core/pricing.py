"""What it would cost to place a request on a replica: facts and learned models in, a Candidate out.

Everything is milliseconds of prefill, so that a policy can add it up. How the terms are weighed is the policy's
business; what they are worth is settled here.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.core import blocks
from router.core.facts import Candidate, Grade
from router.core.fleet import Fleet, Member
from router.core.knowledge import Held, Knowledge
from router.core.prefill import PrefillModel
from router.core.prefix import PrefixIndex
from router.core.reuse import ReuseMemory


@dataclass(frozen=True, slots=True)
class Size:
    """A request in tokens."""

    prompt_tokens: int
    bytes_per_token: float
    text_bytes: int  # worth learning from; 0 when not


class Pricer:
    """Reads the Router's state; changes none of it."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, knowledge: Knowledge, reuse: ReuseMemory) -> None:
        self._fleet = fleet
        self._index = index
        self._knowledge = knowledge
        self._reuse = reuse

    def candidate(
        self, member: Member, size: Size, depth: int, held: Held | None, usual_age_ms: float, now_s: float
    ) -> Candidate:
        """`depth` is how many leading blocks of the prompt the replica is believed to hold by our own estimate, `held`
        what its events say, where they do."""
        estimate = self._estimated_tokens(member, size, depth) if depth else 0
        cached = self._cached_tokens(member, size, estimate, held)
        uncached = size.prompt_tokens - cached
        model = self._fleet.model_of(member)
        footprint = self._index.blocks(member.id)
        free = held.free_tokens if held is not None else None
        if free is None:
            free = int((self._index.capacity(member.id) - footprint) * blocks.BLOCK_BYTES / size.bytes_per_token)
        evicted = uncached - free if free > 0 else uncached
        pending_ms = member.pending_ms(now_s) + member.foreign_waiting * self._fleet.mean_work_ms
        uncached_ms = model.ms(uncached, cached)
        if len(member.leases) > 1:
            slowness = self._fleet.slowness(member, usual_age_ms, now_s)
            pending_ms, uncached_ms = slowness * pending_ms, slowness * uncached_ms
        return Candidate(
            id=member.id,
            cached_tokens=cached,
            uncached_tokens=uncached,
            pending_ms=pending_ms,
            uncached_ms=uncached_ms,
            evicted_ms=self._evicted_ms(member, model, evicted, now_s) if evicted > 0 else 0.0,
            kv_wait_ms=self._kv_wait_ms(member, size) if member.leases else 0.0,
            in_flight=len(member.leases),
            footprint_blocks=footprint,
            grade=_grade(held),
            estimated_tokens=estimate,
        )

    def _cached_tokens(self, member: Member, size: Size, estimate: int, held: Held | None) -> int:
        """By the events where they are whole; where they are not, what they are sure of or our estimate."""
        if member.load.prefix_caching is False:
            return 0
        known = 0
        if held is not None:
            known = capped(held.tokens, size.prompt_tokens, held.block_tokens) if held.tokens else 0
            if held.grade is Grade.EXACT or held.suspended:
                return known
        elif self._knowledge.suspended(member.id):
            return 0
        return max(known, estimate)

    def _estimated_tokens(self, member: Member, size: Size, depth: int) -> int:
        tokens = int(depth * blocks.BLOCK_BYTES / size.bytes_per_token)
        return capped(tokens, size.prompt_tokens, member.load.block_tokens or 1)

    def _evicted_ms(self, member: Member, model: PrefillModel, evicted: float, now_s: float) -> float:
        """Work that others would have to do again, at the price of the middle of a mean prompt: attention makes late
        tokens dear."""
        context = self._fleet.mean_prompt_tokens / 2
        per_token_ms = model.per_token_ms + model.per_token_context_ms * context
        return evicted * per_token_ms * self._asked_again(member.id, now_s)

    def _asked_again(self, id_: str, now_s: float) -> float:
        oldest_s = self._index.oldest_s(id_)
        return self._reuse.probability(now_s - oldest_s, now_s) if oldest_s is not None else 0.0

    def _kv_wait_ms(self, member: Member, size: Size) -> float:
        """Time until open leases have made room: the pool turns over once per mean lease."""
        capacity = member.load.kv_tokens_max
        if not capacity:
            return 0.0
        over = member.kv_tokens_in_use + size.prompt_tokens - capacity
        return over / capacity * self._fleet.mean_open_ms if over > 0 else 0.0


def _grade(held: Held | None) -> Grade:
    """Of one prediction: what is known to be late is not known exactly."""
    if held is None:
        return Grade.ESTIMATED
    return Grade.CATCHING_UP if held.behind else held.grade


def capped(tokens: int, prompt_tokens: int, block_tokens: int) -> int:
    """Cached tokens as the engine counts them: whole blocks, and never the last token, of which the first new one is
    computed (vLLM 0.32 and SGLang 0.5 alike)."""
    return max(0, min(tokens, prompt_tokens - 1) // max(1, block_tokens) * max(1, block_tokens))
