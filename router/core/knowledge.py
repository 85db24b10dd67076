"""What replicas hold by their own word, and how far that word is good.

Each replica with an event stream has a ledger (kv_ledger.py) of what it said it stored and removed. All ledgers
share one map of masks, so one walk over a prompt's token chain finds the longest prefix of every replica.

The grade of a replica is the stream's own (kv_stream.py: continuous since batch 0 or a clear, or not), changed by
what is seen of it:

    exact         the stream is whole, or what it predicted equalled the engine's count on 99 % of 200 answers
    catching-up   the stream is there and not whole, or says more than the ledger may hold: what it says is credited,
                  and so is our own estimate
    estimated     no stream; or predictions that drifted; or no tokenizer for its models; or pages too short

Predictions that drift make the grade fall and ask for a clean replay, later each time it happens again. While a
stream is suspended nothing that it said is credited; where that is for evidence of a restart or a break, nothing at
all.

Blocks just routed are being computed, so they count as held from placement on (`expect`), until the events confirm
them or SETTLE_S after the lease ended: the event of the last step may come behind the answer. Where batches bear times
it takes one that is younger than the lease's end, too, or LATE_S_MAX without any: events may be late (kv_tails.py).
While it is known to be on its way (kv_tails.py), a prediction is not called exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router.core.blocks import token_root
from router.core.facts import Grade, Load
from router.core.keys import TokenPrompt
from router.core.kv_events import Cleared, Event
from router.core.kv_ledger import Ledger
from router.core.kv_stream import RESTARTED
from router.core.masks import SWEEP_KEYS, Masks
from router.core.selfcheck import AnswerCheck, CounterCheck, counters_drift

SETTLE_S = 0.5
AGAIN_S = 0.01  # as SETTLE_S, where the answer may be one that is held already
STRIDES_MAX = 4_096  # of 64 blocks, whose holders are remembered: 40 prompts of 100,000 tokens, 30 MB
CATCH_UP_BLOCKS = 2_048  # that waited for a parent, joined in one go: about a millisecond
BLOCK_TOKENS_MIN = 8  # shorter pages (SGLang's default is 1) would cost a hash and a map entry for nearly every token
DISTRUST_S = 10.0  # a stream that drifts is replayed at once, then after this, then after three times this...
DISTRUST_S_MAX = 640.0
NO_STREAM = "no event stream"


@dataclass(slots=True)  # not frozen: one is made for every replica on every request
class Held:
    """What events say of one replica and one prompt."""

    tokens: int  # longest held prefix, whole blocks, not yet capped
    block_tokens: int
    grade: Grade
    epoch: int  # of the knowledge it was said from
    suspended: bool = False  # nothing that was said may be credited
    doubted: bool = False  # nor may our own estimate
    free_tokens: int | None = None  # of its KV pool, where its capacity is known
    behind: bool = False  # the prompt goes on behind an answer whose events are still to come


@dataclass(slots=True)
class _Known:
    ledger: Ledger
    stream_grade: Grade = Grade.ESTIMATED
    stream_why: str = NO_STREAM
    untokened: str = ""  # why its prompts cannot be turned into tokens
    suspended: str = ""
    doubted: bool = False  # while it is
    distrusted: str = ""
    distrusts: int = 0
    retry_at_s: float = 0.0
    earned: bool = False
    epoch: int = 0
    block_hint: int | None = None  # its block, by its metrics, until an event says
    kv_tokens_max: int | None = None
    shown: tuple[Grade, str] = (Grade.ESTIMATED, NO_STREAM)
    answers: AnswerCheck = field(default_factory=AnswerCheck)
    counters: CounterCheck = field(default_factory=CounterCheck)

    @property
    def block_tokens(self) -> int:
        """Its block; 0 while that is unknown."""
        return self.ledger.block_tokens or self.block_hint or 0

    def judged(self) -> tuple[Grade, str]:
        """The grade, and why."""
        if self.stream_grade is Grade.ESTIMATED:
            return Grade.ESTIMATED, self.stream_why
        if self.distrusted:
            return Grade.ESTIMATED, self.distrusted
        if self.untokened:
            return Grade.ESTIMATED, self.untokened
        block = self.ledger.block_tokens
        if block and block < BLOCK_TOKENS_MIN:
            return Grade.ESTIMATED, f"pages of {block} tokens are too short to follow: use {BLOCK_TOKENS_MIN} or more"
        if not self.ledger.complete:
            return Grade.CATCHING_UP, "it holds more blocks than the index may"
        if self.suspended:
            return Grade.CATCHING_UP, self.suspended
        if self.earned and self.stream_grade is not Grade.EXACT:
            return Grade.EXACT, "predictions equalled its answers"
        return self.stream_grade, self.stream_why


class Knowledge:
    """The sink of all event streams. `graded(replica, grade, why)` hears each change once; `resync(replica)` is asked
    for a clean replay; `restarted(replica)` hears that a replica's cache is empty."""

    def __init__(
        self,
        *,
        blocks_max: int,
        aside_max: int,
        names_max: int,
        graded: Callable[[str, Grade, str], None],
        resync: Callable[[str], None],
        restarted: Callable[[str], None],
    ) -> None:
        self.masks = Masks(STRIDES_MAX)
        self._limits = {"blocks_max": blocks_max, "aside_max": aside_max, "names_max": names_max}
        self._graded = graded
        self._resync = resync
        self._restarted = restarted
        self._known: dict[str, _Known] = {}
        self.follows = False  # whether any replica's events count
        self._settling: deque[tuple[float, str, int, float]] = deque()  # (due, replica, lease, ended)

    # -- what the streams tell us (events.Sink) ------------------------------------------------------------------

    def apply(self, replica: str, event: Event, now_s: float) -> None:
        """One event of one replica's stream."""
        known = self._of(replica)
        whole = known.ledger.complete
        known.ledger.apply(event)
        if isinstance(event, Cleared):
            self._begin(known)
            if known.suspended:  # the ledger began anew, and is seen again
                self.masks.hide(replica)
        if known.ledger.complete is not whole:
            self._judge(replica, known)
        if self.masks.dying:
            self.masks.sweep(SWEEP_KEYS)

    def told(self, replica: str, until_s: float) -> None:
        """All that the replica did before this was said, and applied."""
        self._of(replica).ledger.tails.told(until_s)

    def clear(self, replica: str, why: str, now_s: float) -> None:
        """Nothing that was known of its cache is sure; what comes now is a new beginning, and trusted as one."""
        known = self._of(replica)
        known.ledger.clear()
        known.suspended = known.distrusted = ""
        if known.stream_grade is Grade.EXACT:
            known.stream_grade, known.stream_why = Grade.CATCHING_UP, why  # until the stream says what it is now
        if why.startswith(RESTARTED):
            self._restarted(replica)
        self._begin(known)
        self._judge(replica, known)

    def suspend(self, replica: str, why: str, now_s: float, *, doubt: bool) -> None:
        """Credit nothing that was said until `clear` or `resume`; with `doubt`, which is evidence of a restart or a
        break, our own estimate neither."""
        known = self._of(replica)
        known.suspended, known.doubted = why, doubt
        self.masks.hide(replica)
        self._judge(replica, known)

    def resume(self, replica: str, now_s: float) -> None:
        """The stream proved to be whole."""
        known = self._of(replica)
        if known.suspended:
            known.suspended = ""
            self.masks.show(replica)
            self._judge(replica, known)

    def grade(self, replica: str, grade: Grade, why: str, now_s: float) -> None:
        """The stream's own grade."""
        known = self._of(replica)
        if known.stream_grade is Grade.EXACT and grade is Grade.CATCHING_UP and not known.suspended:
            self._begin(known)  # something was missed: what was earned before it says nothing any more
        known.stream_grade, known.stream_why = grade, why
        if grade is Grade.ESTIMATED:
            known.ledger.clear()
            known.suspended = known.distrusted = ""
        self._judge(replica, known)

    # -- replicas ------------------------------------------------------------------------------------------------

    def forget(self, replica: str) -> None:
        """The replica left the fleet."""
        known = self._known.pop(replica, None)
        if known is not None:
            known.ledger.close()
            self._count_followed()

    def untokened(self, replica: str, why: str) -> None:
        """Whether its prompts can be turned into tokens: why not, or ""."""
        known = self._of(replica)
        if known.untokened != why:
            known.untokened = why
            self._judge(replica, known)

    def standing(self, replica: str) -> tuple[Grade, str]:
        """The replica's grade, and why."""
        known = self._known.get(replica)
        return known.shown if known else (Grade.ESTIMATED, NO_STREAM)

    def doubted(self, replica: str) -> bool:
        """Whether nothing may be credited, not even by our own estimate."""
        known = self._known.get(replica)
        return bool(known and known.suspended and known.doubted)

    def ledger(self, replica: str) -> Ledger | None:
        """What the replica's stream said so far; None where there is no stream."""
        known = self._known.get(replica)
        return known.ledger if known and known.stream_grade is not Grade.ESTIMATED else None

    def checks(self, replica: str) -> tuple[int, int]:
        """(answers that were predicted to the token, answers compared), of the last 200."""
        known = self._known.get(replica)
        return (known.answers.equal, known.answers.checks) if known else (0, 0)

    def block_sizes(self) -> set[int]:
        """Sizes for which a prompt's keys are wanted: those of replicas whose events count."""
        return {k.block_tokens for k in self._known.values() if k.shown[0] is not Grade.ESTIMATED} - {0}

    # -- prompts -------------------------------------------------------------------------------------------------

    def held(self, prompt: TokenPrompt, now_s: float) -> dict[str, Held]:
        """What each replica that is not merely estimated holds of a prompt, by its events."""
        depths = {size: self.masks.match(keys) for size, keys in prompt.keys.items()}
        found: dict[str, Held] = {}
        for name, known in self._known.items():
            grade = known.shown[0]
            if grade is not Grade.ESTIMATED:
                size = known.block_tokens
                tokens = depths[size].get(name, 0) * size if size in depths else 0
                free = known.kv_tokens_max - known.ledger.blocks * size if known.kv_tokens_max and size else None
                behind = grade is Grade.EXACT and self._behind(known, prompt, size, now_s)
                suspended = bool(known.suspended)
                doubted = suspended and known.doubted
                found[name] = Held(tokens, size, grade, known.epoch, suspended, doubted, free, behind)
        return found

    def _behind(self, known: _Known, prompt: TokenPrompt, size: int, now_s: float) -> bool:
        if size not in prompt.keys:  # its block was not known, or another, when the prompt was hashed
            return known.ledger.blocks > 0
        return self._continued(known, prompt, size, now_s)

    def _continued(self, known: _Known, prompt: TokenPrompt, size: int, now_s: float) -> bool:
        root = token_root(prompt.adapter, prompt.salt, size)
        return known.ledger.tails.continued(prompt.keys[size], root, now_s)

    def expect(self, replica: str, lease: int, prompt: TokenPrompt, held: Held) -> None:
        """The prompt's blocks behind what it holds are about to be computed there."""
        known = self._known.get(replica)
        if known is None or not held.block_tokens:
            return
        keys, size = prompt.keys.get(held.block_tokens, []), held.block_tokens
        if new := keys[held.tokens // size :]:
            known.ledger.expect(lease, new)
        last = keys[-1] if keys else token_root(prompt.adapter, prompt.salt, size)
        known.ledger.tails.begin(lease, last, len(keys))

    def settle(
        self, replica: str, lease: int, prompt: TokenPrompt, now_s: float, *, computed: bool, grown_blocks: int = 0
    ) -> None:
        """The lease ended, and its answer filled so many blocks behind the prompt's. What events have not confirmed is
        soon not held after all; at once if it failed."""
        known = self._known.get(replica)
        if known is None:
            return
        if computed:
            self.masks.remember(prompt.keys.get(known.block_tokens, ()))
            due_s = now_s + SETTLE_S
            known.ledger.tails.end(lease, grown_blocks, due_s, now_s + AGAIN_S)
            self._settling.append((due_s, replica, lease, now_s))
        else:
            known.ledger.tails.drop(lease)
            known.ledger.settle(lease)
        self.tick(now_s)

    def behind(self, prompt: TokenPrompt, now_s: float) -> bool:
        """Whether the prompt goes on behind an answer that came before its events: worth a moment's waiting."""
        return any(
            known.shown[0] is Grade.EXACT
            and (size := known.block_tokens) in prompt.keys
            and self._continued(known, prompt, size, now_s)
            for known in self._known.values()
        )

    def tick(self, now_s: float) -> None:
        """Whatever is due by now."""
        while self._settling and self._settling[0][0] <= now_s:
            _, replica, lease, ended_s = self._settling.popleft()
            known = self._known.get(replica)
            if known is None:
                continue
            if known.ledger.tails.over(ended_s, now_s):
                known.ledger.settle(lease)
            else:
                self._settling.append((now_s + SETTLE_S, replica, lease, ended_s))

    def announcing(self, replica: str, *, on: bool) -> None:
        """Whether it was asked to repeat what it holds: then a store of a known block is no second copy."""
        if replica in self._known:
            self._known[replica].ledger.announcing(on)

    # -- self-check ----------------------------------------------------------------------------------------------

    def answered(self, replica: str, held: Held | None, predicted: int, actual: int | None, prompt_tokens: int) -> None:
        """A request ended well; `held` and `predicted` (capped) are what events alone said when it was placed, and
        `actual` what the engine says it found cached, if it does."""
        known = self._known.get(replica)
        if known is None:
            return
        current = held is not None and held.epoch == known.epoch and not held.suspended
        known.counters.finished(predicted if current else None, prompt_tokens, silent=actual is None)
        if held is None or actual is None or not current or held.behind:
            return
        known.answers.observe(predicted, actual, held.block_tokens)
        known.earned = known.answers.agrees
        if known.earned:
            known.distrusts = 0
        self._judge(replica, known)

    def checked(self, replica: str, load: Load, now_s: float) -> None:
        """A probe came in: compare counters, act on drift, and ask for the replay that is due."""
        self.tick(now_s)
        if self.masks.dying:  # also where no event comes any more
            self.masks.sweep(SWEEP_KEYS)
        known = self._known.get(replica)
        if known is None:
            return
        known.ledger.catch_up(CATCH_UP_BLOCKS)
        known.block_hint, known.kv_tokens_max = load.block_tokens, load.kv_tokens_max
        pair = known.counters.observe(load)
        if known.shown[0] is Grade.EXACT:
            if known.answers.drifts:
                checks = known.answers
                self._distrust(replica, known, f"{checks.equal} of {checks.checks} predictions came true", now_s)
            elif pair and counters_drift(*pair):
                self._distrust(replica, known, f"predicted {pair[0]} cached tokens, it counted {pair[1]}", now_s)
        if known.distrusted and known.stream_grade is not Grade.ESTIMATED and now_s >= known.retry_at_s:
            known.retry_at_s = now_s + DISTRUST_S_MAX
            self._resync(replica)

    def _distrust(self, replica: str, known: _Known, why: str, now_s: float) -> None:
        known.distrusted = f"predictions drifted: {why}"
        known.retry_at_s = now_s + min(DISTRUST_S * (2**known.distrusts - 1), DISTRUST_S_MAX)
        known.distrusts += 1
        self._begin(known)
        self._judge(replica, known)

    # -- inside --------------------------------------------------------------------------------------------------

    def _of(self, replica: str) -> _Known:
        known = self._known.get(replica)
        if known is None:
            known = self._known[replica] = _Known(Ledger(self.masks, replica, **self._limits))
        return known

    def _begin(self, known: _Known) -> None:
        """What was predicted before says nothing of what will be."""
        known.epoch += 1
        known.earned = False
        known.answers.clear()
        known.counters.clear()

    def _judge(self, replica: str, known: _Known) -> None:
        judged = known.judged()
        if judged != known.shown:
            news = judged[0] is not known.shown[0]
            known.shown = judged
            if news:
                self._count_followed()
                self._graded(replica, *judged)

    def _count_followed(self) -> None:
        self.follows = any(known.shown[0] is not Grade.ESTIMATED for known in self._known.values())
