"""What it would cost to place a request on a replica: facts and learned models in, a Candidate out.

Everything is milliseconds of prefill, so that a policy can add it up. How the terms are weighed is the policy's
business; what they are worth is settled here.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.core import blocks
from router.core.facts import Candidate
from router.core.fleet import Fleet, Member
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

    def __init__(self, fleet: Fleet, index: PrefixIndex, reuse: ReuseMemory) -> None:
        self._fleet = fleet
        self._index = index
        self._reuse = reuse

    def candidate(self, member: Member, size: Size, depth: int, usual_age_ms: float, now_s: float) -> Candidate:
        """`depth` is how many leading blocks of the prompt the replica is believed to hold."""
        slowness = self._fleet.slowness(member, usual_age_ms, now_s)
        cached = self._cached_tokens(member, size, depth)
        uncached = size.prompt_tokens - cached
        model = self._fleet.model_of(member)
        evicted = self._evicted_tokens(member, size, uncached)
        return Candidate(
            id=member.id,
            cached_tokens=cached,
            uncached_tokens=uncached,
            pending_ms=slowness * (member.pending_ms(now_s) + member.foreign_waiting * self._fleet.mean_work_ms),
            uncached_ms=slowness * model.ms(uncached, cached),
            evicted_ms=self._evicted_ms(member, model, evicted, now_s) if evicted else 0.0,
            kv_wait_ms=self._kv_wait_ms(member, size),
            in_flight=len(member.leases),
            footprint_blocks=self._index.blocks(member.id),
        )

    def _cached_tokens(self, member: Member, size: Size, depth: int) -> int:
        """Rounded and capped as the engine does: whole blocks, and never the last token (vLLM 0.32)."""
        if member.load.prefix_caching is False:
            return 0
        block = member.load.block_tokens or 1
        cached = min(int(depth * blocks.BLOCK_BYTES / size.bytes_per_token), size.prompt_tokens - 1)
        return max(0, cached // block * block)

    def _evicted_tokens(self, member: Member, size: Size, uncached: int) -> float:
        free = self._index.capacity(member.id) - self._index.blocks(member.id)
        free_tokens = free * blocks.BLOCK_BYTES / size.bytes_per_token
        return max(0.0, uncached - max(0.0, free_tokens))

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
        if not capacity or not member.leases:
            return 0.0
        over = member.kv_tokens_in_use + size.prompt_tokens - capacity
        return over / capacity * self._fleet.mean_open_ms if over > 0 else 0.0
