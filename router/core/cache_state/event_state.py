"""Cache state that one replica reported by its event stream, and the confidence grade of that state.

The grades are explained in event_index.py, which keeps one ReplicaEventState for each replica and updates it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.cache_state.calibration import AnswerCheck, CounterCheck, counters_drift
from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.types.placements import Confidence
from router.core.types.replicas import Load

BLOCK_TOKENS_MIN = 8  # shorter pages (SGLang's default is 1) would cost a hash and a map entry for nearly every token
# A stream with predictions that drift is replayed at once, then after 10 s, 30 s, 70 s ..., 640 s at most.
DISTRUST_S, DISTRUST_S_MAX = 10.0, 640.0
NO_STREAM = "no event stream"
HYBRID = "its sliding-window or state layers are not tracked"
NO_SALTS = "a prompt with a cache salt was sent there, and no event has had a salt yet"


@dataclass(slots=True)  # not frozen: one is made for every replica that holds part of a request's prompt
class StoredPrefix:
    """Stored part of one prompt on one replica, according to the replica's events."""

    tokens: int  # longest stored prefix, on the GPU and in tiers below it, in whole blocks, not yet capped
    block_tokens: int
    grade: Confidence
    epoch: int  # Reported.epoch at the time of this prediction
    suspended: bool = False  # True if reported blocks may not be credited
    doubted: bool = False  # True if our own estimate may not be credited either
    free_tokens: int | None = None  # free part of its KV pool, if the capacity and all blocks on its GPU are known
    behind: bool = False  # True if the prompt continues an answer with outstanding events
    tiers: dict[str, int] | None = None  # tokens of `tokens` that must be loaded, by tier; None without any
    kept_share: float = 0.0  # share of the blocks on its GPU that tiers have too
    whole: bool = False  # True if the whole prompt is stored and the engine counts its last block as cached too
    dropped: int = 0  # last matched tokens, which the engine computes again: a block under EAGLE and MTP

    @property
    def gpu_tokens(self) -> int:
        """Tokens of the stored prefix that are on the GPU."""
        return self.tokens - sum(self.tiers.values()) if self.tiers else self.tokens

    def with_depth(self, tokens: int) -> StoredPrefix:
        """Return the same facts for a prompt with this number of stored tokens."""
        said = StoredPrefix(
            tokens, self.block_tokens, self.grade, self.epoch, self.suspended, self.doubted, self.free_tokens
        )
        said.kept_share, said.dropped = self.kept_share, self.dropped
        return said


@dataclass(slots=True)
class ReplicaEventState:
    """State reported by one replica's stream, and the results of checks against its answers."""

    name: str
    engine: EngineBlocks  # blocks that the engine reported as stored
    bytes_counted: int = 0  # bytes of `engine`, as last counted
    stream_grade: Confidence = Confidence.ESTIMATED
    stream_why: str = NO_STREAM
    untokened: str = ""  # reason why its prompts cannot be turned into tokens; "" if they can
    suspended: str = ""  # reason why no reported block is credited; "" if they are credited
    doubted: bool = False  # True if our own estimate is not credited either, while suspended
    distrusted: str = ""  # how its predictions drifted; "" if they did not
    distrusts: int = 0  # number of drifts since its predictions were last correct
    retry_at_s: float = 0.0  # time of the next request for a clean replay after a drift
    earned: bool = False  # True if predictions matched its answers: the grade is exact, regardless of the stream
    hybrid: bool = False  # True if events named a layer group that does not cover a whole prefix
    epoch: int = 0  # incremented at every new start; predictions of an older epoch are not compared
    whole: bool = False  # True if an answer showed that the replica also loads the block of a prompt's last token
    # True if events name salts; False if a salted prompt was sent and no event has named a salt
    names_salts: bool | None = None
    salted: set[int] = field(default_factory=set)  # open leases of such prompts, until one is computed
    block_hint: int | None = None  # tokens of its block by its metrics, until an event states the size
    kv_tokens_max: int | None = None
    shown: tuple[Confidence, str] = (Confidence.ESTIMATED, NO_STREAM)  # the effective grade, and the reason
    answers: AnswerCheck = field(default_factory=AnswerCheck)
    counters: CounterCheck = field(default_factory=CounterCheck)

    @property
    def block_tokens(self) -> int:
        """Tokens of its block; 0 while unknown."""
        return self.engine.block_tokens or self.block_hint or 0

    def compute_confidence(self) -> tuple[Confidence, str]:
        """Return the grade, and the reason for it."""
        if self.stream_grade is Confidence.ESTIMATED:
            return Confidence.ESTIMATED, self.stream_why
        if self.distrusted:
            return Confidence.ESTIMATED, self.distrusted
        if self.untokened:
            return Confidence.ESTIMATED, self.untokened
        if self.names_salts is False:
            return Confidence.ESTIMATED, NO_SALTS
        block = self.engine.block_tokens
        if block and block < BLOCK_TOKENS_MIN:
            return (
                Confidence.ESTIMATED,
                f"pages of {block} tokens are too short to track: use {BLOCK_TOKENS_MIN} or more",
            )
        if not self.engine.complete:
            return Confidence.CATCHING_UP, "it has more blocks than the index may hold"
        if self.suspended:
            return Confidence.CATCHING_UP, self.suspended
        if self.earned and (self.hybrid or self.stream_grade is not Confidence.EXACT):
            return Confidence.EXACT, "predictions matched its answers"
        if self.hybrid and self.stream_grade is Confidence.EXACT:
            return Confidence.CATCHING_UP, HYBRID
        return self.stream_grade, self.stream_why

    def empty(self) -> StoredPrefix:
        """Return the prediction for a prompt of which the replica stores no block."""
        engine, size, suspended, free = self.engine, self.block_tokens, bool(self.suspended), None
        if self.kv_tokens_max and size and engine.complete:
            free = self.kv_tokens_max - engine.gpu_blocks * size
        said = StoredPrefix(0, size, self.shown[0], self.epoch, suspended, suspended and self.doubted, free)
        said.kept_share, said.dropped = engine.kept_share, self.answers.dropped_blocks * size
        return said

    def expect_salt(self, lease: int, tokens: int, stored_tokens: int) -> bool:
        """Record that a salted prompt was sent, of which this many tokens are stored. Returns True if that changes the
        grade.

        The grade changes with the first salted prompt with a new first block. It stays changed until an event names a
        salt, or until it is known that no such prompt was computed.

        Events of vLLM 0.15 and SGLang 0.5.8 name no salt. A plain prompt would then count as cached on every replica
        that has a salted prompt with the same tokens. The prediction would be wrong, and it would show the client that
        another tenant sent the prompt.
        """
        is_open = self.names_salts is None or bool(self.salted)
        if not is_open or stored_tokens or tokens < (self.block_tokens or BLOCK_TOKENS_MIN):
            return False
        self.salted.add(lease)
        self.names_salts = False
        return len(self.salted) == 1

    def forget_salts(self) -> None:
        """Forget salts: another process may publish at this address now."""
        self.names_salts = None
        self.salted.clear()

    def settle_salt(self, lease: int, *, computed: bool) -> bool:
        """End a lease. Returns True if that changes the grade: if no salted prompt was computed, no event with a salt
        was due."""
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
        """Start a new epoch: earlier predictions are no longer evidence about later ones."""
        self.epoch += 1
        self.earned = False
        self.answers.clear()
        self.counters.clear()

    def distrust(self, why: str, now_s: float) -> None:
        """Start a new epoch because predictions drifted. A clean replay is requested, later each time."""
        self.begin()
        self.distrusted = f"predictions drifted: {why}"
        self.retry_at_s = now_s + min(DISTRUST_S * (2**self.distrusts - 1), DISTRUST_S_MAX)
        self.distrusts += 1

    def drift(self, load: Load) -> str:
        """Process a probe's result. Returns how predictions drift from answers or counters, while the grade is exact;
        "" if they do not drift."""
        pair = self.counters.observe(load)
        if self.shown[0] is not Confidence.EXACT:
            return ""
        if self.answers.drifts:
            return f"{self.answers.equal} of {self.answers.checks} predictions were exact"
        return (
            f"predicted {pair[0]} cached tokens, the engine counted {pair[1]}" if pair and counters_drift(*pair) else ""
        )
