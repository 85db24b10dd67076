"""Breakdown of a placed prompt: every token is a hit, or a miss with a reason.

Reasons are consecutive stretches of the prompt, each cut off at the end of the prompt's full blocks:

    hit | spilled | evicted, replica_lost | identity | diverged | cold or new | tail

The first two end with the blocks that a replica is estimated to hold. Blocks that were computed before, by the memory
of blocks or by the texts of earlier prompts, and that no replica holds now, were evicted, or their replica is gone. A
cache has an epoch (see Member.life), which a restart changes. After these, the texts of earlier prompts give the
reasons. The rest was not seen before. The remainder is the tail: the last token, a partial block of the engine's, and
the part of a router's block that earlier prompts had, for which no key exists.

Texts are remembered when they are read, so they include prompts that were placed and never computed. For such a prompt
the memory of blocks drops the entries of its placement, and keeps the key of the first block that is then unknown. If
that block is requested again, the result from the texts is cut off there.

So a breakdown adds up by construction. It still does after the engine's count is applied (`with_actual_usage`), which
is final.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from router.core.insights.two_generation_cache import CHAIN_MAX, Generations
from router.core.prompts.block_keys import BLOCK_BYTES, Chain
from router.core.types.cache_misses import MissReason, PromptAnalysis, TokenBreakdown
from router.core.types.placements import Confidence, Receipt, Usage

NEVER_MAX = 8_192  # prompts that are known not to have been computed
PROMPTS_PART = 4  # blocks for each remembered prompt: the prompts of a load test have several blocks each
LOST_MAX = 512  # blocks looked up for one prompt; a longer prompt is sampled at even distances
RATIO_SPREAD = 4  # bytes per token of a part of a prompt are those of the whole prompt, plus or minus a quarter

# Enum members are slow to look up, and each request is broken down by all of these.
_DIVERGED, _EVICTED, _SPILLED, _LOST, _IDENTITY = (
    MissReason.DIVERGED, MissReason.EVICTED, MissReason.SPILLED, MissReason.REPLICA_LOST, MissReason.IDENTITY
)  # fmt: skip
_MISPREDICTED, _UNSUPPORTED, _COLD, _NEW, _TAIL = (
    MissReason.MISPREDICTED, MissReason.UNSUPPORTED, MissReason.COLD, MissReason.NEW, MissReason.TAIL
)  # fmt: skip
_BY_POSITION = (_SPILLED, _EVICTED, _LOST, _IDENTITY, _DIVERGED, _COLD, _NEW, _UNSUPPORTED, _TAIL)
_AVOIDABLE_FIRST = tuple(MissReason)
_ESTIMATED = Confidence.ESTIMATED
_NOTHING = PromptAnalysis()


class Explainer:
    """Index of blocks that were computed before, each with the cache that computed it last, and of requested
    prompts."""

    def __init__(self, blocks_max: int, *, replay_window_s: float) -> None:
        self._blocks: Generations[int] = Generations(blocks_max)
        self._prompts: Generations[float] = Generations(blocks_max // PROMPTS_PART)
        self._never: Generations[bool] = Generations(NEVER_MAX)
        self._replay_window_s = replay_window_s

    def explain(
        self,
        receipt: Receipt,
        chain: Chain | None,
        bytes_per_token: float,
        depth: int,
        life: int,
        sighting: PromptAnalysis | None,
        now_s: float,
        *,
        block_tokens: int,
        lives: Callable[[], Collection[int]],
        retry: bool = False,
    ) -> None:
        """Write `miss` and `replay` into the receipt, and record that the chosen replica computes the prompt now.

        - `depth`: number of the prompt's leading blocks that the replica holds by the router's estimate.
        - `life`: its cache epoch. `lives()` are the epochs of all current caches.
        - `block_tokens`: length of its engine's block.
        - `retry`: the memory contains the request itself, from its first attempt. Earlier knowledge then comes from the
          texts only.
        """
        prompt_tokens, hit = receipt.prompt_tokens, receipt.predicted_cached_tokens
        if hit > prompt_tokens:
            hit = prompt_tokens
        if chain is None or not prompt_tokens:
            left = prompt_tokens - hit
            receipt.miss = TokenBreakdown(prompt_tokens, hit, {_UNSUPPORTED: left} if left else {})
            add_external_kv(receipt.miss, receipt)
            return
        keys, blocks = chain.keys, self._blocks
        if sighting is None:
            sighting = _NOTHING
        known_blocks = sighting.known_bytes // BLOCK_BYTES
        spilled = receipt.spilled_tokens
        asked_s = self._prompts.put(chain.end_key, now_s)
        young = seen = 0
        if keys:
            young, seen = blocks.depths(keys, known_blocks or depth)
            receipt.seen_blocks = seen
            if known_blocks > seen and not retry and seen < len(keys) and self._never.get(keys[seen]):
                sighting = replace(sighting, known_bytes=seen * BLOCK_BYTES)
        if retry:  # blocks that the first attempt was going to compute count as held there
            receipt.seen_blocks = min(seen, known_blocks)
            spilled = min(spilled, max(0, int(sighting.known_bytes / bytes_per_token) - hit))
        elif asked_s is not None and now_s - asked_s <= self._replay_window_s:
            receipt.replay, known_blocks = True, len(keys)
        else:
            known_blocks = max(seen, sighting.known_bytes // BLOCK_BYTES)
        receipt.miss = self._breakdown(
            receipt, sighting, keys, known_blocks, bytes_per_token, hit, spilled, block_tokens, life, lives
        )
        add_external_kv(receipt.miss, receipt)
        if len(keys) > young or len(keys) > depth:
            blocks.put_chain(keys, young, depth, life)

    def take_back(self, receipt: Receipt, keys: Sequence[int], end_key: int, placed_s: float, life: int) -> None:
        """Undo the record of a placed prompt that was not computed: the next request for it counts as the first. The
        `keys` that the cache was going to compute are dropped, except those that another cache has begun to compute
        since."""
        seen = receipt.seen_blocks
        for key in keys[seen:CHAIN_MAX]:
            self._blocks.drop(key, life)
        if not receipt.replay:
            self._prompts.drop(end_key, placed_s)
        if seen < len(keys):
            self._never.put(keys[seen], True)

    def turned_away(self, chain: Chain) -> None:
        """Record that a prompt was never placed, although its text may be remembered."""
        _, seen = self._blocks.depths(chain.keys)
        if seen < len(chain.keys):
            self._never.put(chain.keys[seen], True)

    def _breakdown(
        self,
        receipt: Receipt,
        sighting: PromptAnalysis,
        keys: Sequence[int],
        known_blocks: int,
        ratio: float,
        hit: int,
        spilled: int,
        block_tokens: int,
        life: int,
        lives: Callable[[], Collection[int]],
    ) -> TokenBreakdown:
        """Return the stretches in order, each cut off by the ones before it.

        Tokens that were computed before and that no replica holds are split in two: those that a replica could hold
        (`evicted`), and those without a key (`part`).
        """
        prompt_tokens, known_bytes, replay = receipt.prompt_tokens, sighting.known_bytes, receipt.replay
        whole = (prompt_tokens - 1) // block_tokens * block_tokens
        room = whole - hit if whole > hit else 0
        if spilled > room:
            spilled = room
        known = known_blocks or known_bytes or replay
        left, evicted, part = room - spilled, 0, 0
        if known and left:
            at, upto = hit + spilled, int(known_blocks * BLOCK_BYTES / ratio)
            if upto > at:
                evicted = _count_evicted(receipt.grade, ratio, block_tokens, upto, at, left)
            most = whole if replay else int(known_bytes / ratio)
            part = max(most, upto) - at - evicted
            if part <= 0:
                part = 0
            elif part > block_tokens or part > left - evicted:
                part = _part(receipt.grade, ratio, block_tokens, part, left - evicted)
        rest, misses, elsewhere = left - evicted - part, {}, 0
        if spilled or evicted or sighting.repeated_bytes or sighting.identity_bytes:
            lost = 0
            if evicted:
                lost, elsewhere = self._count_dropped(
                    evicted, keys[int(at * ratio) // BLOCK_BYTES : known_blocks], life, lives
                )
            misses = _attribute_misses(sighting, known, ratio, rest, hit, spilled, evicted - lost, lost)
        elif rest:
            misses[_NEW if known or hit or sighting.turn or sighting.template else _COLD] = rest
        if tail := prompt_tokens - hit - room + part:
            misses[_TAIL] = tail
        saved_ms = _saved_ms(receipt) if spilled else 0.0
        return TokenBreakdown(prompt_tokens, hit, misses, saved_ms, dropped_elsewhere=elsewhere)

    def _count_dropped(
        self, tokens: int, keys: Sequence[int], life: int, lives: Callable[[], Collection[int]]
    ) -> tuple[int, int]:
        """Return (the number of `tokens` computed last by caches that are gone, the number computed last by another
        cache than `life`). No replica holds these tokens any longer. Cache `life` is taken to have dropped the rest.
        `keys` are their blocks."""
        looked_up = keys[:: -(-len(keys) // LOST_MAX)] if len(keys) > LOST_MAX else keys
        alive, gone, others = lives(), 0, 0
        for key in looked_up:
            last = self._blocks.get(key)
            if last is None or last == life:
                continue
            if last in alive:
                others += 1
            else:
                gone += 1
        count = len(looked_up)
        return tokens * gone // count if gone else 0, tokens * others // count if others else 0


def _count_evicted(grade: Confidence, ratio: float, block_tokens: int, known: int, at: int, left: int) -> int:
    """Return the tokens between `at` and `known`, of the `left` ones, that a replica could hold, and that no replica
    holds.

    Held tokens are counted in whole blocks of the engine's, so a smaller gap is no evidence of an eviction. If the hit
    is known by token ids, the two counts use different measures: the end of a block in tokens is then a guess.
    """
    gap, slack = known - at, max(BLOCK_BYTES / ratio / 2, block_tokens)
    if grade is not _ESTIMATED:
        slack += known // RATIO_SPREAD
    return min(gap, left) if gap > slack else 0


def _part(grade: Confidence, ratio: float, block_tokens: int, part: int, left: int) -> int:
    """Return the tokens that were computed before and have no key: less than a block of the router's and one of the
    engine's."""
    part_max = block_tokens + (int(BLOCK_BYTES / ratio) if grade is _ESTIMATED else 0)
    return min(part, part_max, left)


def _attribute_misses(
    sighting: PromptAnalysis,
    known: object,
    ratio: float,
    rest: int,
    hit: int,
    spilled: int,
    evicted: int,
    lost: int,
) -> dict[MissReason, int]:
    """Return the misses before the tail, the avoidable ones first. `rest` tokens of them were never held, to current
    knowledge."""
    misses: dict[MissReason, int] = {}
    nothing_known = not (known or sighting.repeated_bytes)
    identity = 0
    if rest and sighting.repeated_bytes:
        diverged = int(sighting.repeated_bytes / ratio + 0.5)
        misses[_DIVERGED] = diverged = min(rest, max(1, diverged))
        rest -= diverged
    elif rest and nothing_known and sighting.identity_bytes:
        identity = min(rest, max(0, int(sighting.identity_bytes / ratio) - hit - spilled))
        rest -= identity
    if evicted:
        misses[_EVICTED] = evicted
    if spilled:
        misses[_SPILLED] = spilled
    if lost:
        misses[_LOST] = lost
    if identity:
        misses[_IDENTITY] = identity
    if rest:
        related = spilled or identity or sighting.turn or sighting.template or hit
        misses[_COLD if nothing_known and not related else _NEW] = rest
    return misses


def _saved_ms(receipt: Receipt) -> float:
    """Return the additional time to first token at the replica that holds most of the prompt, if it was a candidate."""
    chosen = next((c for c in receipt.candidates if c.id == receipt.replica), None)
    if chosen is None:
        return 0.0
    most = receipt.predicted_cached_tokens + receipt.spilled_tokens
    there_ms = [c.first_token_ms for c in receipt.candidates if c.cached_tokens == most]
    return max(0.0, min(there_ms) - receipt.first_token_ms(chosen)) if there_ms else 0.0


def add_external_kv(miss: TokenBreakdown, receipt: Receipt) -> None:
    """Record the part of a predicted hit that must be brought to the GPU first."""
    miss.loaded = min(miss.hit, receipt.predicted_tier_tokens)
    if receipt.pull is not None:
        miss.pulled = min(miss.hit - miss.loaded, receipt.pull.tokens)


def default_breakdown(receipt: Receipt, usage: Usage | None) -> TokenBreakdown:
    """Return the breakdown of a request that no observatory explained. Hits are the engine's own count, if it reported
    one."""
    tokens, hit = receipt.prompt_tokens, receipt.predicted_cached_tokens
    if usage is not None and usage.verified:
        tokens, hit = usage.prompt_tokens, usage.cached_tokens or 0
    hit = min(hit, tokens)
    pulled = receipt.pull.tokens if receipt.pull is not None else 0
    not_there = max(0, hit - receipt.predicted_cached_tokens + receipt.predicted_tier_tokens + pulled)
    misses = {_UNSUPPORTED: tokens - hit} if tokens > hit else {}
    loaded = min(not_there, receipt.predicted_tier_tokens)
    return TokenBreakdown(tokens, hit, misses, loaded=loaded, pulled=min(not_there - loaded, pulled))


def with_actual_usage(miss: TokenBreakdown, usage: Usage | None) -> TokenBreakdown:
    """Return the breakdown with the engine's own count, if it reported the number of cached tokens; else unchanged."""
    if usage is None or usage.cached_tokens is None or usage.prompt_tokens <= 0:
        return miss
    total, hit = usage.prompt_tokens, usage.cached_tokens
    if total == miss.prompt_tokens and hit == miss.hit:
        return miss
    return _apply_actual_usage(miss, total, min(max(hit, 0), total))


def _apply_actual_usage(miss: TokenBreakdown, total: int, hit: int) -> TokenBreakdown:
    """Apply the engine's count. If its prompt is longer or shorter than the router's, the predicted hit ends between
    the router's count and the same fraction of the engine's prompt: at the engine's count, if that lies between them.
    All stretches after it grow or shrink by the same factor."""
    predicted, before = miss.hit, miss.misses
    if total != miss.prompt_tokens:
        scaled = predicted * total // miss.prompt_tokens if miss.prompt_tokens else 0
        low, high = (predicted, scaled) if predicted < scaled else (scaled, predicted)
        predicted = min(low if hit < low else min(hit, high), total)
    left, rest, found = miss.prompt_tokens - miss.hit, total - predicted, hit - predicted
    if not left:  # the length was unknown
        before, left = {_UNSUPPORTED: 1}, 1
    misses: dict[MissReason, int] = {}
    upto = end = 0
    sorted_ = _DIVERGED not in before and _EVICTED not in before
    for reason in before if sorted_ else [reason for reason in _BY_POSITION if reason in before]:
        upto += before[reason]
        begin, end = end, upto * rest // left
        if end > begin and end > found:  # a stretch that ends before `found` was a hit, although not predicted
            misses[reason] = end - max(begin, found)
    if found < 0:
        misses[_MISPREDICTED] = -found
        sorted_ = False
    if not sorted_:
        misses = {reason: misses[reason] for reason in _AVOIDABLE_FIRST if reason in misses}
    # Loaded tokens follow those on the GPU, and pulled tokens follow the loaded ones. Tokens that the engine did not
    # find are subtracted in reverse order.
    on_gpu = miss.hit - miss.loaded - miss.pulled
    loaded = max(0, min(miss.loaded, hit - on_gpu))
    pulled = max(0, min(miss.pulled, hit - on_gpu - miss.loaded))
    # The positions of tokens that others dropped are unknown within the evicted stretch. Its rest has the same share of
    # them.
    elsewhere = miss.dropped_elsewhere
    if elsewhere:
        elsewhere = elsewhere * misses.get(_EVICTED, 0) // before.get(_EVICTED, 1)
    saved_ms = miss.saved_ms if _SPILLED in misses else 0.0
    return TokenBreakdown(total, hit, misses, saved_ms, loaded, elsewhere, miss.held, pulled)
