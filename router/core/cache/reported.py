"""What one replica reported by its event stream, and the grade that its word has.

The grades are explained in knowledge.py, which keeps one Reported for each replica and tells it what is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.cache.engine_blocks import EngineBlocks
from router.core.cache.selfcheck import AnswerCheck, CounterCheck, counters_drift
from router.core.facts.placements import Grade
from router.core.facts.replicas import Load

BLOCK_TOKENS_MIN = 8  # shorter pages (SGLang's default is 1) would cost a hash and a map entry for nearly every token
# A stream whose predictions drift is replayed at once; then after 10 s, 30 s, 70 s ..., 640 s at most.
DISTRUST_S, DISTRUST_S_MAX = 10.0, 640.0
NO_STREAM = "no event stream"
HYBRID = "its sliding-window or state layers are not followed"
NO_SALTS = "a salted prompt was sent there, and no event has named a salt yet"


@dataclass(slots=True)  # not frozen: one is made for every replica that holds some of a request's prompt
class StoredPrefix:
    """What events say of one replica and one prompt."""

    tokens: int  # longest stored prefix, on the GPU and in tiers behind that, whole blocks, not yet capped
    block_tokens: int
    grade: Grade
    epoch: int  # Reported.epoch when this was said
    suspended: bool = False  # nothing that events said may be credited
    doubted: bool = False  # our own estimate may not be credited either
    free_tokens: int | None = None  # room in its KV pool, where its capacity and all that its GPU stores are known
    behind: bool = False  # the prompt goes on behind an answer whose events are still to come
    tiers: dict[str, int] | None = None  # tokens of `tokens` that are to be loaded, by tier; None where none is
    kept_share: float = 0.0  # part of what its GPU stores that tiers have as well
    whole: bool = False  # the stored prefix is the whole prompt, and the engine counts its last block as cached too
    dropped: int = 0  # last matched tokens, which the engine computes again: a block under EAGLE and MTP

    @property
    def gpu_tokens(self) -> int:
        """Tokens of the stored prefix that its GPU has."""
        return self.tokens - sum(self.tiers.values()) if self.tiers else self.tokens

    def but(self, tokens: int) -> StoredPrefix:
        """The same for a prompt of which so many tokens are stored."""
        said = StoredPrefix(
            tokens, self.block_tokens, self.grade, self.epoch, self.suspended, self.doubted, self.free_tokens
        )
        said.kept_share, said.dropped = self.kept_share, self.dropped
        return said


@dataclass(slots=True)
class Reported:
    """What one replica's stream said, and what was seen of its word."""

    name: str
    engine: EngineBlocks  # blocks that the engine says it stores
    bytes_counted: int = 0  # bytes of `engine`, as last counted
    stream_grade: Grade = Grade.ESTIMATED
    stream_why: str = NO_STREAM
    untokened: str = ""  # why its prompts cannot be turned into tokens; "": they can
    suspended: str = ""  # why nothing that was said is credited; "": it is
    doubted: bool = False  # our own estimate is not credited either, while suspended
    distrusted: str = ""  # how its predictions drifted; "": they did not
    distrusts: int = 0  # how often they drifted since they last came true
    retry_at_s: float = 0.0  # time to ask for a clean replay after a drift
    earned: bool = False  # predictions equalled its answers: exact, whatever the stream says
    hybrid: bool = False  # blocks of a group were seen that do not answer for a whole prefix
    epoch: int = 0  # counts new beginnings: a prediction from an older one says nothing
    whole: bool = False  # an answer showed that the replica loads the block of a prompt's last token too
    names_salts: bool | None = None  # whether events name salts; False: a salted prompt was sent, and none has yet
    salted: set[int] = field(default_factory=set)  # open leases of such prompts, until one is computed
    block_hint: int | None = None  # tokens of its block by its metrics, until an event says
    kv_tokens_max: int | None = None
    shown: tuple[Grade, str] = (Grade.ESTIMATED, NO_STREAM)  # the grade that counts, and why
    answers: AnswerCheck = field(default_factory=AnswerCheck)
    counters: CounterCheck = field(default_factory=CounterCheck)

    @property
    def block_tokens(self) -> int:
        """Tokens of its block; 0 while that is unknown."""
        return self.engine.block_tokens or self.block_hint or 0

    def judged(self) -> tuple[Grade, str]:
        """The grade, and why."""
        if self.stream_grade is Grade.ESTIMATED:
            return Grade.ESTIMATED, self.stream_why
        if self.distrusted:
            return Grade.ESTIMATED, self.distrusted
        if self.untokened:
            return Grade.ESTIMATED, self.untokened
        if self.names_salts is False:
            return Grade.ESTIMATED, NO_SALTS
        block = self.engine.block_tokens
        if block and block < BLOCK_TOKENS_MIN:
            return Grade.ESTIMATED, f"pages of {block} tokens are too short to follow: use {BLOCK_TOKENS_MIN} or more"
        if not self.engine.complete:
            return Grade.CATCHING_UP, "it holds more blocks than the index may"
        if self.suspended:
            return Grade.CATCHING_UP, self.suspended
        if self.earned and (self.hybrid or self.stream_grade is not Grade.EXACT):
            return Grade.EXACT, "predictions equalled its answers"
        if self.hybrid and self.stream_grade is Grade.EXACT:
            return Grade.CATCHING_UP, HYBRID
        return self.stream_grade, self.stream_why

    def empty(self) -> StoredPrefix:
        """What is said of a prompt of which the replica stores nothing."""
        engine, size, suspended, free = self.engine, self.block_tokens, bool(self.suspended), None
        if self.kv_tokens_max and size and engine.complete:
            free = self.kv_tokens_max - engine.gpu_blocks * size
        said = StoredPrefix(0, size, self.shown[0], self.epoch, suspended, suspended and self.doubted, free)
        said.kept_share, said.dropped = engine.kept_share, self.answers.dropped_blocks * size
        return said

    def expect_salt(self, lease: int, tokens: int, stored_tokens: int) -> bool:
        """A salted prompt was sent, of which so much is stored. Whether that changes the grade: it does from the first
        such prompt whose first block is new, until an event names a salt or no such prompt is computed.

        Events of vLLM 0.15 and SGLang 0.5.8 name none. By these, a plain prompt would count as cached wherever a salted
        one with the same tokens is: a wrong prediction, and a word to its sender about another tenant.
        """
        is_open = self.names_salts is None or bool(self.salted)
        if not is_open or stored_tokens or tokens < (self.block_tokens or BLOCK_TOKENS_MIN):
            return False
        self.salted.add(lease)
        self.names_salts = False
        return len(self.salted) == 1

    def forget_salts(self) -> None:
        """Another process may publish there now."""
        self.names_salts = None
        self.salted.clear()

    def settle_salt(self, lease: int, *, computed: bool) -> bool:
        """A lease ended. Whether that changes the grade: if no salted prompt was computed, no event was to come."""
        if lease not in self.salted:
            return False
        self.salted.discard(lease)
        if computed:
            self.salted.clear()
        elif not self.salted:
            self.names_salts = None
            return True
        return False

    def begin(self) -> None:
        """What was predicted before says nothing of what will be predicted."""
        self.epoch += 1
        self.earned = False
        self.answers.clear()
        self.counters.clear()

    def distrust(self, why: str, now_s: float) -> None:
        """Predictions drifted: begin anew. A clean replay is asked for, later each time."""
        self.begin()
        self.distrusted = f"predictions drifted: {why}"
        self.retry_at_s = now_s + min(DISTRUST_S * (2**self.distrusts - 1), DISTRUST_S_MAX)
        self.distrusts += 1

    def drift(self, load: Load) -> str:
        """Take a probe's view. How predictions drift from its answers or its counters, while they count as exact; ""
        where they do not drift."""
        pair = self.counters.observe(load)
        if self.shown[0] is not Grade.EXACT:
            return ""
        if self.answers.drifts:
            return f"{self.answers.equal} of {self.answers.checks} predictions came true"
        return f"predicted {pair[0]} cached tokens, it counted {pair[1]}" if pair and counters_drift(*pair) else ""
