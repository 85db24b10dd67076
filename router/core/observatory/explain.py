"""A placement and a sighting make a breakdown: every token of the prompt a hit, or a miss with a reason.

Reasons are stretches of the prompt, one behind the other, each cut off where the prompt's full blocks end:

    hit | spilled | evicted, replica_lost | identity | diverged | cold or new | tail

What a replica is believed to hold ends the first two. What was computed before, by the memory of blocks or by the
texts of earlier prompts, and is held by nobody now was evicted, or its holder is gone: a cache has a number (see
Member.life), which a restart changes. Behind that the texts say what else an earlier prompt had (`Sighting`); the
rest was not seen before. What is left over is the tail: the last token, a begun block of the engine's, and of ours the
part that earlier prompts had, for which there is no key.

Texts are remembered when they are read, so they know of prompts that came to nothing, too. Of those the memory of
blocks forgets what it was told when they were placed, and keeps the key of the first block that is then unknown: where
that is asked for again, texts are not believed.

So a breakdown adds up by construction, and does so still when the engine has counted (`settled`): its word is final.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from router.core.facts.misses import Breakdown, Miss, Sighting
from router.core.facts.placements import Candidate, Grade, Receipt, Usage
from router.core.observatory.generations import CHAIN_MAX, Generations
from router.core.prompts.blocks import BLOCK_BYTES, Chain

NEVER_MAX = 8_192  # prompts that are known not to have been computed
PROMPTS_PART = 4  # one prompt is remembered for so many blocks: those of a load test have several each
LOST_MAX = 512  # blocks looked up for one prompt; a longer prompt is sampled at even distances
RATIO_SPREAD = 4  # bytes per token of a part of a prompt are those of the whole, give or take a quarter

# An enum's member costs as much as a call to look up.
_DIVERGED, _EVICTED, _SPILLED, _LOST, _IDENTITY = (
    Miss.DIVERGED, Miss.EVICTED, Miss.SPILLED, Miss.REPLICA_LOST, Miss.IDENTITY
)  # fmt: skip
_MISPREDICTED, _UNSUPPORTED, _COLD, _NEW, _TAIL = (
    Miss.MISPREDICTED, Miss.UNSUPPORTED, Miss.COLD, Miss.NEW, Miss.TAIL
)  # fmt: skip
_BY_POSITION = (_SPILLED, _EVICTED, _LOST, _IDENTITY, _DIVERGED, _COLD, _NEW, _UNSUPPORTED, _TAIL)
_AVOIDABLE_FIRST = tuple(Miss)
_ESTIMATED = Grade.ESTIMATED
_NOTHING = Sighting()


class Explainer:
    """Remembers which blocks were computed before, by which cache last, and which prompts were asked for."""

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
        sighting: Sighting | None,
        now_s: float,
        *,
        block_tokens: int,
        lives: Callable[[], Collection[int]],
        retry: bool = False,
    ) -> None:
        """Write `miss` and `replay` into the receipt, and take note that the chosen replica computes the prompt now.

        Of the prompt's blocks it has the first `depth` by our own estimate; its cache is number `life`, its engine's
        block `block_tokens` long. `lives()` are the caches that there are. With `retry` the memory knows the request
        itself, from its first attempt: what was known before is then the sighting's word alone.
        """
        prompt_tokens, hit = receipt.prompt_tokens, receipt.predicted_cached_tokens
        if hit > prompt_tokens:
            hit = prompt_tokens
        if chain is None or not prompt_tokens:
            left = prompt_tokens - hit
            receipt.miss = Breakdown(prompt_tokens, hit, {_UNSUPPORTED: left} if left else {})
            brought(receipt.miss, receipt)
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
        if retry:  # blocks that the first attempt was to compute count as held there
            receipt.seen_blocks = min(seen, known_blocks)
            spilled = min(spilled, max(0, int(sighting.known_bytes / bytes_per_token) - hit))
        elif asked_s is not None and now_s - asked_s <= self._replay_window_s:
            receipt.replay, known_blocks = True, len(keys)
        else:
            known_blocks = max(seen, sighting.known_bytes // BLOCK_BYTES)
        receipt.miss = self._breakdown(
            receipt, sighting, keys, known_blocks, bytes_per_token, hit, spilled, block_tokens, life, lives
        )
        brought(receipt.miss, receipt)
        if len(keys) > young or len(keys) > depth:
            blocks.put_chain(keys, young, depth, life)

    def take_back(self, receipt: Receipt, keys: Sequence[int], end_key: int, placed_s: float, life: int) -> None:
        """What was placed was not computed: whoever asks again asks for the first time. Of `keys`, those that the cache
        was to compute are forgotten, but not those that another one has begun with since."""
        seen = receipt.seen_blocks
        for key in keys[seen:CHAIN_MAX]:
            self._blocks.drop(key, life)
        if not receipt.replay:
            self._prompts.drop(end_key, placed_s)
        if seen < len(keys):
            self._never.put(keys[seen], True)

    def turned_away(self, chain: Chain) -> None:
        """A prompt was never placed, though its text may be remembered."""
        _, seen = self._blocks.depths(chain.keys)
        if seen < len(chain.keys):
            self._never.put(chain.keys[seen], True)

    def _breakdown(
        self,
        receipt: Receipt,
        sighting: Sighting,
        keys: Sequence[int],
        known_blocks: int,
        ratio: float,
        hit: int,
        spilled: int,
        block_tokens: int,
        life: int,
        lives: Callable[[], Collection[int]],
    ) -> Breakdown:
        """One stretch behind the other, each with what the ones before it have left.

        Of what was computed before, and that nobody holds, there is what a replica could hold (`evicted`), and what has
        no key (`part`).
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
                evicted = _evicted(receipt.grade, ratio, block_tokens, upto, at, left)
            most = whole if replay else int(known_bytes / ratio)
            part = (most if most > upto else upto) - at - evicted  # noqa: FURB136 - half the time
            if part <= 0:
                part = 0
            elif part > block_tokens or part > left - evicted:
                part = _part(receipt.grade, ratio, block_tokens, part, left - evicted)
        rest, misses, elsewhere = left - evicted - part, {}, 0
        if spilled or evicted or sighting.repeated_bytes or sighting.identity_bytes:
            lost = 0
            if evicted:
                lost, elsewhere = self._dropped(
                    evicted, keys[int(at * ratio) // BLOCK_BYTES : known_blocks], life, lives
                )
            misses = _named(sighting, known, ratio, rest, hit, spilled, evicted - lost, lost)
        elif rest:
            misses[_NEW if known or hit or sighting.turn or sighting.template else _COLD] = rest
        if tail := prompt_tokens - hit - room + part:
            misses[_TAIL] = tail
        saved_ms = _saved_ms(receipt) if spilled else 0.0
        return Breakdown(prompt_tokens, hit, misses, saved_ms, dropped_elsewhere=elsewhere)

    def _dropped(
        self, tokens: int, keys: Sequence[int], life: int, lives: Callable[[], Collection[int]]
    ) -> tuple[int, int]:
        """How many of `tokens`, held by nobody any more, were computed last by caches that are gone, and how many by
        another cache than number `life`; the rest was dropped there, as far as is known. `keys` are their blocks."""
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


def _evicted(grade: Grade, ratio: float, block_tokens: int, known: int, at: int, left: int) -> int:
    """Tokens between `at` and `known`, of the `left` ones, that a replica could hold, and none does.

    What is held is counted in whole blocks of the engine's, so less than that says nothing of an eviction. Where it is
    known by token ids, the two are of different measure: where a block ends in tokens is a guess.
    """
    gap, slack = known - at, max(BLOCK_BYTES / ratio / 2, block_tokens)
    if grade is not _ESTIMATED:
        slack += known // RATIO_SPREAD
    return min(gap, left) if gap > slack else 0


def _part(grade: Grade, ratio: float, block_tokens: int, part: int, left: int) -> int:
    """Tokens that were computed before but have no key: less than a block of ours and one of the engine's."""
    part_max = block_tokens + (int(BLOCK_BYTES / ratio) if grade is _ESTIMATED else 0)
    return min(part, part_max, left)


def _named(
    sighting: Sighting,
    known: object,
    ratio: float,
    rest: int,
    hit: int,
    spilled: int,
    evicted: int,
    lost: int,
) -> dict[Miss, int]:
    """The misses before the tail, the avoidable ones first; `rest` tokens of them were never held, as far as known."""
    misses: dict[Miss, int] = {}
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
    """How much longer the first token would have taken at the replica that holds most of the prompt, where that could
    have been asked."""
    chosen = next((c for c in receipt.candidates if c.id == receipt.replica), None)
    if chosen is None:
        return 0.0
    most = receipt.predicted_cached_tokens + receipt.spilled_tokens
    there_ms = [_first_token_ms(c) for c in receipt.candidates if c.cached_tokens == most]
    here_ms, leg = _first_token_ms(chosen), receipt.leg
    if leg is not None:
        here_ms = leg.pending_ms + leg.uncached_ms + leg.transfer_ms
    return max(0.0, min(there_ms) - here_ms) if there_ms else 0.0


def _first_token_ms(c: Candidate) -> float:
    return c.pending_ms + c.kv_wait_ms + c.loading_ms + c.uncached_ms


def brought(miss: Breakdown, receipt: Receipt) -> None:
    """Note what of a predicted hit is to be brought to the GPU first."""
    miss.loaded = min(miss.hit, receipt.predicted_tier_tokens)
    if receipt.pull is not None:
        miss.pulled = min(miss.hit - miss.loaded, receipt.pull.tokens)


def unexplained(receipt: Receipt, usage: Usage | None) -> Breakdown:
    """The breakdown of a request that no observatory explained: hits by the engine's own count, where it told."""
    tokens, hit = receipt.prompt_tokens, receipt.predicted_cached_tokens
    if usage is not None and usage.verified:
        tokens, hit = usage.prompt_tokens, usage.cached_tokens or 0
    hit = min(hit, tokens)
    pulled = receipt.pull.tokens if receipt.pull is not None else 0
    not_there = max(0, hit - receipt.predicted_cached_tokens + receipt.predicted_tier_tokens + pulled)
    misses = {_UNSUPPORTED: tokens - hit} if tokens > hit else {}
    loaded = min(not_there, receipt.predicted_tier_tokens)
    return Breakdown(tokens, hit, misses, loaded=loaded, pulled=min(not_there - loaded, pulled))


def settled(miss: Breakdown, usage: Usage | None) -> Breakdown:
    """The breakdown by the engine's own count, where it told how many tokens it found; else the same."""
    if usage is None or usage.cached_tokens is None or usage.prompt_tokens <= 0:
        return miss
    total, hit = usage.prompt_tokens, usage.cached_tokens
    if total == miss.prompt_tokens and hit == miss.hit:
        return miss
    return _settled(miss, total, min(max(hit, 0), total))


def _settled(miss: Breakdown, total: int, hit: int) -> Breakdown:
    """Where the engine's prompt is longer or shorter than ours, what we predicted ends somewhere between our count and
    the same part of its: at its own count, if that is there. Behind that all stretches grow or shrink alike."""
    predicted, before = miss.hit, miss.misses
    if total != miss.prompt_tokens:
        scaled = predicted * total // miss.prompt_tokens if miss.prompt_tokens else 0
        low, high = (predicted, scaled) if predicted < scaled else (scaled, predicted)
        predicted = min(low if hit < low else min(hit, high), total)
    left, rest, found = miss.prompt_tokens - miss.hit, total - predicted, hit - predicted
    if not left:  # nothing was known of its length
        before, left = {_UNSUPPORTED: 1}, 1
    misses: dict[Miss, int] = {}
    upto = end = 0
    sorted_ = _DIVERGED not in before and _EVICTED not in before
    for reason in before if sorted_ else [reason for reason in _BY_POSITION if reason in before]:
        upto += before[reason]
        begin, end = end, upto * rest // left
        if end > begin and end > found:  # a stretch that ends before `found` was a hit, though not predicted
            misses[reason] = end - (begin if begin > found else found)  # noqa: FURB136 - half the time
    if found < 0:
        misses[_MISPREDICTED] = -found
        sorted_ = False
    if not sorted_:
        misses = {reason: misses[reason] for reason in _AVOIDABLE_FIRST if reason in misses}
    # What is loaded lies behind what the GPU has, and what is pulled behind that: what the engine did not find is
    # missing from there first.
    on_gpu = miss.hit - miss.loaded - miss.pulled
    loaded = max(0, min(miss.loaded, hit - on_gpu))
    pulled = max(0, min(miss.pulled, hit - on_gpu - miss.loaded))
    # Nobody knows where in the stretch of evicted tokens those are that others dropped: of its rest they are as many.
    elsewhere = miss.dropped_elsewhere
    if elsewhere:
        elsewhere = elsewhere * misses.get(_EVICTED, 0) // before.get(_EVICTED, 1)
    saved_ms = miss.saved_ms if _SPILLED in misses else 0.0
    return Breakdown(total, hit, misses, saved_ms, loaded, elsewhere, miss.held, pulled)
