"""What it would cost to place a request on a replica: facts and learned models in, a Candidate out.

Everything is milliseconds of prefill, so that a policy can add it up. How the terms are weighed is the policy's
business; what they are worth is settled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from msgspec import Struct

from router.core.cache.estimate import PrefixIndex
from router.core.cache.knowledge import Held, Knowledge
from router.core.facts.placements import Candidate, Grade
from router.core.facts.requests import Ask
from router.core.fleet.fleet import Fleet
from router.core.fleet.member import Member
from router.core.learned.answers import Answer, Span
from router.core.learned.reuse import ReuseMemory
from router.core.learned.token_ratio import ModelTokens, plausible
from router.core.placement.evictions import Displaced, Sums
from router.core.prompts.blocks import BLOCK_BYTES, Chain
from router.core.prompts.token_keys import TokenPrompt

FEW = 16  # replicas of which each is looked at closely for every request
CALMEST, HOLDERS = 6, 6  # of more replicas, how many of those with least to do, and of those that hold most
_ESTIMATED = Grade.ESTIMATED  # to look an enum's member up costs as much as a call


class Size(Struct, gc=False):  # see core/facts/requests.py
    """A request in tokens. Bytes are canonical: see Prompt."""

    prompt_tokens: int
    bytes_per_token: float  # of the whole prompt
    text_bytes: int  # worth learning from; 0 when not
    text_bytes_per_token: float  # of text that follows it
    pool_bytes_per_token: float  # of what fills a cache
    opaque_bytes: int = 0  # besides its text


class Work(Struct, gc=False):
    """What is to be placed: a request in tokens, and what is believed held of its prompt."""

    size: Size
    answer_tokens: float  # expected of its answer
    keys: list[int]  # of its prompt's blocks
    depths: dict[str, int]  # leading blocks that each replica is believed to hold by our own estimate
    held: dict[str, Held] | None  # what Knowledge.held says; None where the prompt's tokens are not known


class Standings(Struct, gc=False):
    """How busy the replicas are that may take a request. `waits_ms` is in their order."""

    waits_ms: list[float]  # prefill sent to each replica and not yet done, others' included
    slower: dict[str, float]  # how many times slower than its peers a replica looks
    backlog_ms: float  # mean of `waits_ms`
    median_ms: float  # of `waits_ms`, of two in the middle the lesser
    in_flight: int  # open leases of all replicas
    footprint_blocks: int  # blocks that all replicas are believed to hold


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

    def survey(self, members: list[Member], now_s: float) -> Standings:
        """One cheap look at every replica that may take a request."""
        slower, holders = self._fleet.slowness(now_s), self._index.holders
        waits_ms, sum_ms, in_flight, footprint = list[float](), 0.0, 0, 0
        for member in members:
            wait_ms = member.pending_ms(now_s)
            if member.foreign_waiting:
                wait_ms += member.foreign_waiting * member.speeds.mean_work_ms
            if slower and member.id in slower:
                wait_ms *= slower[member.id]
            waits_ms.append(wait_ms)
            sum_ms += wait_ms
            in_flight += len(member.leases)
            footprint += len(holders[member.id].owner)
        count = len(members)
        median_ms = sorted(waits_ms)[(count - 1) // 2] if sum_ms else 0.0
        return Standings(waits_ms, slower, sum_ms / count, median_ms, in_flight, footprint)

    def shortlist(self, members: list[Member], work: Work, standings: Standings, near: Sequence[str]) -> list[int]:
        """Places in `members` of those that can be the cheapest: who holds part of the prompt, who is `near` (its home,
        its places on the ring), and who has least to do, at its own speed. All others hold as little as those last ones
        and have more to do. Of many that hold as much, those with least to do are listed. How much decoding weighs is
        the policy's to say, between nothing and as much as waiting, so the ends of both orders are listed."""
        prompt_tokens, answer, depths, held = work.size.prompt_tokens, work.answer_tokens, work.depths, work.held or {}
        loads = list[tuple[float, int]]()
        deepest, stored = list[tuple[int, float, int]](), list[tuple[int, float, int]]()
        prefill, cold_ms, waits_ms, slower = None, 0.0, standings.waits_ms, standings.slower
        for n, member in enumerate(members):
            model, step, streams = member.prefill_model, member.step_model, len(member.leases)
            if model is not prefill:  # replicas share one until they have their own
                prefill, cold_ms = model, model.ms(prompt_tokens, 0)
            work_ms = (1 + streams) * cold_ms
            if slower and member.id in slower:
                work_ms *= slower[member.id]
            # As StepModel.ms, whose call for every replica would show.
            step_ms = step.floor_ms + step.per_stream_ms * streams + step.per_context_token_ms * member.context_tokens
            loads.append((waits_ms[n] + answer * step_ms + work_ms, n))
        listed, wanted = set[int](), set(near)
        for load, n in loads:
            id_ = members[n].id
            if id_ in wanted:
                listed.add(n)
            if id_ in depths:
                deepest.append((-depths[id_], load, n))
            if id_ in held:
                stored.append((-held[id_].tokens, load, n))
        listed.update(n for _, n in nsmallest(CALMEST, loads))
        listed.update(n for _, _, n in nsmallest(CALMEST, [(waits_ms[n], load, n) for load, n in loads]))
        listed.update(n for _, _, n in nsmallest(HOLDERS, deepest))
        listed.update(n for _, _, n in nsmallest(HOLDERS, stored))
        return sorted(listed)

    def candidates(
        self, members: list[Member], waits_ms: Sequence[float], slower: dict[str, float], work: Work, now_s: float
    ) -> list[Candidate]:
        """Each of `members` with what a placement there costs; `waits_ms` and `slower` as in Standings."""
        size, holders, candidates = work.size, self._index.holders, []
        prompt_tokens, ratio, answer = size.prompt_tokens, size.pool_bytes_per_token, work.answer_tokens
        alone, odds = self._fleet.alone, None
        for n, member in enumerate(members):
            id_, load, said, cached, estimate = member.id, member.load, None, 0, 0
            if work.held is not None:
                said = work.held.get(id_) or self._knowledge.empty(id_)
            if said is not None or id_ in work.depths:
                if id_ in work.depths:
                    estimate = self._estimated_tokens(member, size, work.depths[id_])
                cached = self._cached_tokens(member, size, estimate, said)
            holder = holders[id_]
            uncached, footprint = prompt_tokens - cached, len(holder.owner)
            free = said.free_tokens if said is not None else None
            known = alone or free is not None
            if free is None:
                free = int((holder.blocks_max - footprint) * BLOCK_BYTES / ratio)
            evicted, evicted_ms, again_ms, kv_wait_ms = uncached - free if free > 0 else uncached, 0.0, 0.0, 0.0
            # Where another router sends too and no events tell what is held, what goes is not ours to know. To price
            # it by our share of the replica's prompts was raced: better below saturation, worse at and above it.
            if evicted > 0 and known:
                if odds is None:
                    odds = self._reuse.odds(now_s)
                sums = self._displaced.sums(id_, member.life, holder, odds, now_s)
                if sums is not None:
                    evicted_ms, again_ms = _evictions(member, sums, evicted, ratio)
            if load.kv_tokens_max:
                kv_wait_ms = self._kv_wait_ms(member, work)
            model = member.prefill_model
            uncached_ms = model.ms(uncached, cached)
            if slower and id_ in slower:
                uncached_ms *= slower[id_]
            # Everybody who is open there now will decode beside this answer, for some of its time.
            streams, step = len(member.leases), member.step_model
            context = prompt_tokens + answer / 2
            own_ms = step.per_stream_ms + step.per_context_token_ms * context
            beside_ms = step.ms(streams, member.context_tokens + streams * answer / 2)
            candidates.append(
                Candidate(  # by place: with the names it takes twice as long
                    id_,
                    cached,
                    uncached,
                    waits_ms[n],
                    uncached_ms,
                    evicted_ms,
                    kv_wait_ms,
                    streams,
                    footprint,
                    _ESTIMATED if said is None else _grade(said),
                    estimate,
                    again_ms,
                    answer * (beside_ms + own_ms),
                    streams * answer / 2 * own_ms,
                    streams * (uncached_ms - model.floor_ms) if uncached_ms > model.floor_ms else 0.0,
                )
            )
        return candidates

    def elsewhere(self, asked: list[Member], work: Work) -> dict[str, int]:
        """Tokens of the prompt that replicas are believed to hold which may not take it: all but those `asked`."""
        members, size, depths, held = self._fleet.members, work.size, work.depths, work.held
        if len(asked) == len(members):
            return {}
        found = {}
        for id_ in (depths.keys() | (held or {}).keys()) - {member.id for member in asked}:
            if (member := members.get(id_)) is not None:
                depth = depths.get(id_, 0)
                estimate = self._estimated_tokens(member, size, depth) if depth else 0
                said = None if held is None else held.get(id_) or self._knowledge.empty(id_)
                if tokens := self._cached_tokens(member, size, estimate, said):
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

    def _kv_wait_ms(self, member: Member, work: Work) -> float:
        """Time until the KV pool has room for the prompt. Engines admit a prompt when all of it has room, in the order
        in which they came. What decodes gives its room back within the mean time that this takes, little by little."""
        load, live, speeds, size = member.load, member.live, member.speeds, work.size
        capacity, ratio = load.kv_tokens_max or 0, size.pool_bytes_per_token
        own, probed = live.own_tokens + member.decoding * speeds.mean_answer_tokens / 2, 0.0
        if load.kv_usage is not None:
            probed = load.kv_usage * capacity
        room = capacity - size.prompt_tokens
        if probed <= room and live.unshared_blocks * BLOCK_BYTES / ratio + own <= room:
            return 0.0  # even if nothing is shared
        used = max(probed, live.blocks * BLOCK_BYTES / ratio + own)  # not all of it is ours
        if used <= room:
            return 0.0
        over = used + size.prompt_tokens - live.shared(work.keys) * BLOCK_BYTES / ratio - capacity
        return over / capacity * (speeds.mean_decode_ms or speeds.mean_open_ms) if over > 0 else 0.0


def _evictions(member: Member, sums: Sums, tokens: float, bytes_per_token: float) -> tuple[float, float]:
    """What others would have to do again for so many tokens that are evicted, and what that would evict in its turn, in
    milliseconds: at the price of the middle of a mean prompt, as attention makes late tokens dear."""
    model = member.prefill_model
    all_ms = tokens * (model.per_token_ms + model.per_token_context_ms * member.speeds.mean_prompt_tokens / 2)
    asked, turns = sums.of(tokens * bytes_per_token / BLOCK_BYTES)
    return asked * all_ms, turns * all_ms


def size_of(
    ask: Ask,
    chain: Chain | None,
    tokens: ModelTokens,
    body_tokens: int,
    counted: TokenPrompt | None,
    quoted: list[tuple[Span, Answer]],
) -> Size:
    """Of a request: by its token ids where they are `counted`; else by bytes of its prompt, as many to a token as in
    the turn of the conversation that it quotes, or as learned of its model (`tokens`), as is what an image has; else
    `body_tokens`."""
    prompt, pool = ask.prompt, tokens.pool_ratio
    if counted is not None and counted.tokens:
        text_bytes = prompt.size if prompt is not None and prompt.bytes_per_token is None else 0
        ratio = text_bytes / counted.tokens if plausible(text_bytes / counted.tokens) else tokens.bytes_per_token
        return Size(counted.tokens, ratio, text_bytes, ratio, ratio * pool)
    ratio = tokens.bytes_per_token
    if prompt is None or chain is None:
        return Size(body_tokens, ratio, 0, ratio, ratio * pool)
    if prompt.opaque_bytes:
        count, text_bytes = tokens.tokens_of(prompt), prompt.size - prompt.opaque_bytes
        learned = prompt.opaque_bytes if prompt.bytes_per_token is None else 0
        return Size(count, prompt.size / count, text_bytes if learned else 0, ratio, ratio * pool, learned)
    if prompt.bytes_per_token is not None:
        ratio = prompt.bytes_per_token
        return Size(max(1, round(prompt.size / ratio)), ratio, 0, ratio, ratio * pool)
    for (_, start, _), answer in quoted:
        if answer.prompt_tokens and plausible(start / answer.prompt_tokens):
            ratio = start / answer.prompt_tokens  # the conversation's own, from its last turn
            break
    text_bytes = prompt.size
    return Size(round(text_bytes / ratio) or 1, ratio, text_bytes, ratio, ratio * pool)


def _grade(held: Held) -> Grade:
    """Of one prediction: what is known to be late is not known exactly."""
    return Grade.CATCHING_UP if held.behind else held.grade


def capped(tokens: int, prompt_tokens: int, block_tokens: int) -> int:
    """Cached tokens as the engine counts them: whole blocks, and never the last token, of which the first new one is
    computed (vLLM 0.32 and SGLang 0.5 alike)."""
    return max(0, min(tokens, prompt_tokens - 1) // max(1, block_tokens) * max(1, block_tokens))
