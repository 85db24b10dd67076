"""What it would cost to place a request on a replica: facts and learned models in, a Candidate out.

Everything is milliseconds of prefill, so that a policy can add it up. How the terms are weighed is the policy's
business; what they are worth is settled here.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from router.core.answers import Answer, Span
from router.core.blocks import BLOCK_BYTES, Chain
from router.core.displaced import Displaced
from router.core.facts import Ask, Candidate, Grade
from router.core.fleet import Fleet
from router.core.keys import TokenPrompt
from router.core.knowledge import Held, Knowledge
from router.core.member import Member
from router.core.prefix import PrefixIndex
from router.core.reuse import ReuseMemory
from router.core.tokens import ModelTokens, plausible

_ESTIMATED = Grade.ESTIMATED  # to look an enum's member up costs as much as a call


class Size(Struct, gc=False):  # see facts.py
    """A request in tokens."""

    prompt_tokens: int
    bytes_per_token: float
    text_bytes: int  # worth learning from; 0 when not


class Pricer:
    """Reads the Router's state; changes none of it but sums of its own."""

    def __init__(self, fleet: Fleet, index: PrefixIndex, knowledge: Knowledge, reuse: ReuseMemory) -> None:
        self._fleet = fleet
        self._index = index
        self._knowledge = knowledge
        self._reuse = reuse
        self._displaced = Displaced()

    def forget(self, id_: str) -> None:
        """A replica has left."""
        self._displaced.forget(id_)

    def candidates(
        self,
        members: list[Member],
        size: Size,
        keys: Sequence[int],
        depths: dict[str, int],
        held: dict[str, Held],
        pending_ms: dict[str, float],
        now_s: float,
    ) -> list[Candidate]:
        """By replica: `keys` are the prompt's blocks, `depths` how many leading ones it is believed to hold by our own
        estimate, `held` what its events say, where they do, `pending_ms` what we sent there and is not prefilled."""
        fleet, holders, candidates = self._fleet, self._index.holders, []
        prior, mean_work_ms, mean_answer_tokens = fleet.prefill.model, fleet.mean_work_ms, fleet.mean_answer_tokens
        prompt_tokens, ratio, slower = size.prompt_tokens, size.bytes_per_token, fleet.slowness(now_s)
        context, odds, alone = fleet.mean_prompt_tokens / 2, None, fleet.alone
        for member in members:
            id_, load, live, said, cached, estimate = member.id, member.load, member.live, None, 0, 0
            if held:
                said = held.get(id_)
            if said is not None or id_ in depths:
                estimate = self._estimated_tokens(member, size, depths[id_]) if id_ in depths else 0
                cached = self._cached_tokens(member, size, estimate, said)
            holder = holders[id_]
            uncached, footprint = prompt_tokens - cached, len(holder.owner)
            free = said.free_tokens if said is not None else None
            known = alone or free is not None
            if free is None:
                free = int((holder.blocks_max - footprint) * BLOCK_BYTES / ratio)
            evicted, evicted_ms, again_ms, kv_wait_ms = uncached - free if free > 0 else uncached, 0.0, 0.0, 0.0
            model = member.fit.model if member.fit.observations else prior
            # Where another router sends too and no events tell what is held, what goes is not ours to know.
            if evicted > 0 and known:
                if odds is None:
                    odds = self._reuse.odds(now_s)
                sums = self._displaced.sums(id_, member.life, holder, odds, now_s)
                if sums is not None:
                    # Others would have to do that again, at the price of the middle of a mean prompt: attention makes
                    # late tokens dear.
                    evicted_all_ms = evicted * (model.per_token_ms + model.per_token_context_ms * context)
                    asked, turns = sums.of(evicted * ratio / BLOCK_BYTES)
                    evicted_ms, again_ms = asked * evicted_all_ms, turns * evicted_all_ms
            if capacity := load.kv_tokens_max:
                own, probed = live.own_tokens + member.decoding * mean_answer_tokens / 2, 0.0
                if load.kv_usage is not None:
                    probed = load.kv_usage * capacity
                room = capacity - prompt_tokens
                if probed > room or live.unshared_blocks * BLOCK_BYTES / ratio + own > room:  # else there surely is
                    used = live.blocks * BLOCK_BYTES / ratio + own
                    if probed > used:  # not all of it is ours
                        used = probed
                    if used > room:
                        kv_wait_ms = self._kv_wait_ms(member, size, keys, used)
            waiting_ms = pending_ms[id_] + member.foreign_waiting * mean_work_ms
            uncached_ms = model.ms(uncached, cached)
            if slower and id_ in slower:
                waiting_ms, uncached_ms = slower[id_] * waiting_ms, slower[id_] * uncached_ms
            candidates.append(
                Candidate(  # by place: with the names it takes twice as long
                    id_,
                    cached,
                    uncached,
                    waiting_ms,
                    uncached_ms,
                    evicted_ms,
                    kv_wait_ms,
                    len(member.leases),
                    footprint,
                    _ESTIMATED if said is None else _grade(said),
                    estimate,
                    again_ms,
                )
            )
        return candidates

    def elsewhere(
        self, candidates: list[Candidate], size: Size, depths: dict[str, int], held: dict[str, Held]
    ) -> dict[str, int]:
        """Tokens of the prompt that replicas are believed to hold which are no candidates."""
        members = self._fleet.members
        if len(candidates) == len(members):
            return {}
        weighed = {c.id for c in candidates}
        found = {}
        for id_ in (depths.keys() | held.keys()) - weighed:
            if (member := members.get(id_)) is not None:
                depth = depths.get(id_, 0)
                estimate = self._estimated_tokens(member, size, depth) if depth else 0
                if tokens := self._cached_tokens(member, size, estimate, held.get(id_)):
                    found[id_] = tokens
        return found

    def _cached_tokens(self, member: Member, size: Size, estimate: int, held: Held | None) -> int:
        """By the events where they are whole; where they are not, what they are sure of or our estimate."""
        if member.load.prefix_caching is False:
            return 0
        known = 0
        if held is not None:
            known = capped(held.tokens, size.prompt_tokens, held.block_tokens) if held.tokens else 0
            if held.grade is Grade.EXACT or held.doubted:
                return known
        elif self._knowledge.doubted(member.id):
            return 0
        return max(known, estimate)

    def _estimated_tokens(self, member: Member, size: Size, depth: int) -> int:
        tokens = int(depth * BLOCK_BYTES / size.bytes_per_token)
        return capped(tokens, size.prompt_tokens, member.load.block_tokens or 1)

    def _kv_wait_ms(self, member: Member, size: Size, keys: Sequence[int], used_tokens: float) -> float:
        """Time until enough of the KV pool is free, of which `used_tokens` are used, and the prompt does not fit into
        the rest: engines admit a prompt when all of it has room, in the order in which they came. What decodes gives
        its room back within the mean time that this takes, little by little."""
        capacity, live = member.load.kv_tokens_max or 0, member.live
        over = used_tokens + size.prompt_tokens - live.shared(keys) * BLOCK_BYTES / size.bytes_per_token - capacity
        return over / capacity * (self._fleet.mean_decode_ms or self._fleet.mean_open_ms) if over > 0 else 0.0


def size_of(
    ask: Ask,
    chain: Chain | None,
    tokens: ModelTokens,
    body_tokens: int,
    counted: TokenPrompt | None,
    quoted: list[tuple[Span, Answer]],
) -> Size:
    """Of a request: by its token ids where they are `counted`; else by bytes of its prompt, as many to a token as in
    the turn of the conversation that it quotes, or as learned of its model (`tokens`); else `body_tokens`."""
    prompt = ask.prompt
    if counted is not None and counted.tokens:
        text_bytes = prompt.size if prompt is not None and prompt.bytes_per_token is None else 0
        ratio = text_bytes / counted.tokens if plausible(text_bytes / counted.tokens) else tokens.bytes_per_token
        return Size(counted.tokens, ratio, text_bytes)
    if prompt is None or chain is None:
        return Size(body_tokens, tokens.bytes_per_token, 0)
    if prompt.bytes_per_token is not None:
        return Size(max(1, round(prompt.size / prompt.bytes_per_token)), prompt.bytes_per_token, 0)
    ratio, plain = tokens.bytes_per_token, not prompt.opaque_bytes
    for (_, start, _), answer in quoted if plain else ():
        if answer.prompt_tokens and plausible(start / answer.prompt_tokens):
            ratio = start / answer.prompt_tokens  # the conversation's own, from its last turn
            break
    text_bytes = prompt.size
    return Size(round(text_bytes / ratio) or 1, ratio, text_bytes if plain else 0)


def _grade(held: Held) -> Grade:
    """Of one prediction: what is known to be late is not known exactly."""
    return Grade.CATCHING_UP if held.behind else held.grade


def capped(tokens: int, prompt_tokens: int, block_tokens: int) -> int:
    """Cached tokens as the engine counts them: whole blocks, and never the last token, of which the first new one is
    computed (vLLM 0.32 and SGLang 0.5 alike)."""
    return max(0, min(tokens, prompt_tokens - 1) // max(1, block_tokens) * max(1, block_tokens))
