"""Placements as facts that nobody changes: candidates, the choice, receipts, outcomes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum

from msgspec import Struct

from router.core.facts.legs import PrefillLeg
from router.core.facts.misses import Breakdown


class Grade(StrEnum):
    """How far the router's belief about what a replica holds can be trusted."""

    EXACT = "exact"
    CATCHING_UP = "catching-up"
    ESTIMATED = "estimated"
    UNSEEN = "unseen"  # estimated, and no answer comes by here that would correct it


OF_REPLICAS = (Grade.EXACT, Grade.CATCHING_UP, Grade.ESTIMATED)  # grades of replicas; the others are of requests


class Reason(StrEnum):
    """Why a request went where it went; the values of `x-warmroute-reason`."""

    WARM = "warm"  # the replica that holds the longest part of the prompt
    SPILL = "spill"  # another replica holds more, but waiting there would cost more than computing here
    COLD = "cold"  # no replica holds any of the prompt
    TIE = "tie"  # prices too close to tell apart: the hash ring decided
    ONLY = "only"  # one candidate
    POLICY = "policy"  # a policy that does not look at the cache
    RETRY = "retry"  # a second attempt, after the first replica failed
    PULL = "pull"  # another replica holds more, and its memory sends that to this one
    SPLIT = "split"  # another replica prefills it, and sends the blocks to this one


class HeldBack(Exception):
    """A request had better be placed later: placing it now would evict more work than its waiting costs."""


class Shed(Exception):
    """A request is turned away, though replicas are there: the fleet is full, or its tenant has had its share."""

    def __init__(self, code: str, message: str, retry_after_s: float) -> None:
        """`code` is stable: `overloaded`, `rate_limited`. `retry_after_s`: when it may be worth asking again."""
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


class Pull(Struct, gc=False):
    """Tokens of a prompt that a replica lacks and another one has in CPU memory. Times are milliseconds."""

    source: str  # replica that has them
    address: str  # where the engine there takes orders of its peers: `host:port`
    tokens: int  # length of that part of the prompt, which begins where what the replica itself holds ends
    fetch_ms: float  # time until they are there, the pulls before it on the same way included
    uncached_ms: float  # prefill time of what is left then
    stalled_ms: float  # sum of delays that this prefill causes the answers that decode there
    alone: bool = False  # no long prefill was there when the request was placed, and it need not wait for room
    took_ms: float | None = None  # time that it took; None where that is not known


class Moved(Struct, gc=False):
    """What a replica would bring to its GPU for a request from tiers behind that."""

    tier_tokens: int  # part of `cached_tokens` that is to be loaded
    loading_ms: float  # time of that load, and of the loads before it


class Brought(Struct, gc=False):
    """Parts of `Receipt.predicted_cached_tokens` that are not on the replica's GPU yet."""

    tier_tokens: int = 0  # to be loaded from its own tiers
    pull: Pull | None = None  # to come from another replica; None: nothing
    leg: PrefillLeg | None = None  # the replica that prefills the prompt; None: the one that decodes does


class Candidate(Struct, gc=False):
    """One replica that may take the request, and what a placement there would cost. Times are milliseconds."""

    id: str
    cached_tokens: int  # longest prefix of the prompt that the replica is believed to hold
    uncached_tokens: int
    pending_ms: float  # prefill time of the work that waits there, other routers' included
    uncached_ms: float  # prefill time of this prompt's uncached part
    evicted_ms: float  # work that others would repeat: evicted tokens x chance that they are asked for again
    kv_wait_ms: float  # time until the KV pool has room for this request
    in_flight: int  # open leases
    grade: Grade = Grade.ESTIMATED  # how sure `cached_tokens` is
    estimated_tokens: int = 0  # cached tokens by our own estimate alone, whatever the events say
    evicted_again_ms: float = 0.0  # work repeated because the repeated work evicts others in turn, and so on
    decode_ms: float = 0.0  # time from this answer's first token to its last, beside the answers that decode there
    slowed_ms: float = 0.0  # sum of delays that this answer's decoding steps cause the answers that decode there
    stalled_ms: float = 0.0  # sum of delays that this prompt's prefill causes the answers that decode there
    price_ms: float = 0.0  # price that the policy makes of all these terms; 0 where it compares none
    room_ms: float = 0.0  # sum of delays that the KV room which this answer keeps causes those who wait for room there
    moved: Moved | None = None  # None: all that it holds is on its GPU

    @property
    def tier_tokens(self) -> int:
        """Part of `cached_tokens` that is to be loaded from tiers behind the GPU."""
        return self.moved.tier_tokens if self.moved is not None else 0

    @property
    def loading_ms(self) -> float:
        """Time of that load, and of the loads before it."""
        return self.moved.loading_ms if self.moved is not None else 0.0


class Split(Struct, gc=False):
    """A request in two legs, and what that would cost."""

    prefill: Candidate
    decode: Candidate
    transfer_ms: float  # time until the blocks are at the decoding replica, once they are computed
    price_ms: float  # price of both legs, comparable with a candidate's

    @property
    def expected_ms(self) -> float:
        """Milliseconds from the placement to the first token."""
        first, second = self.prefill, self.decode
        computed_ms = max(first.pending_ms, first.kv_wait_ms) + first.loading_ms + first.uncached_ms
        return max(computed_ms + self.transfer_ms, second.pending_ms, second.kv_wait_ms)


class Market(Struct, gc=False):
    """What a policy is told of the request and of the fleet, besides the candidates."""

    ring_key: str  # session hint; without one the chain key behind the first user message
    tie_ms: float  # prices closer than this cannot be told apart
    unit_ms: float  # learned time of BACKLOG_TOKENS of prefill: the unit in which queues are measured
    backlog: float  # mean time until what waits for prefill at a replica is done, in units
    median_backlog: float = 0.0  # median of the same times, in units: one long prompt does not make the fleet busy
    replicas: int = 0  # number of replicas that may take the request, candidates or not
    in_flight: int = 0  # open leases of all these replicas
    home: str = ""  # replica that gave the conversation's last answer
    elsewhere: float = 0.0  # chance that another router sent an unknown prompt's beginning to its place on the ring
    expected: str = ""  # replica on which the client's words let some of the prompt be expected; "": none
    order: Sequence[str] = ()  # ids of all replicas, the nearest to the ring key first; () where all are candidates
    # Ids of replicas that this router takes first of equals, as other routers take the rest; empty: it is alone.
    own: Collection[str] = ()


class Choice(Struct, gc=False):
    """A policy's answer.

    `tied`: the ring decided, not the price. `guessed`: no replica is known to hold the prompt, so its place on the ring
    was taken, where other routers would have sent it too. `hold_back`: the request had better not be placed for now.
    """

    id: str
    tied: bool = False
    guessed: bool = False
    hold_back: bool = False


class Usage(Struct, gc=False):
    """Token counts as the engine reports them; `cached_tokens` is None where its flags keep it silent."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def found_by(self, prefill: Usage | None) -> Usage:
        """Usage of a decode leg, as this is, with what the prefill leg found cached: by most handshakes the decoding
        engine counts as cached all that came from there. Of a prefill leg that told nothing, nothing is known."""
        found = None
        if prefill is not None and prefill.cached_tokens is not None:
            found = min(prefill.cached_tokens, self.prompt_tokens)
        return Usage(self.prompt_tokens, self.completion_tokens, found)

    @property
    def verified(self) -> bool:
        """Whether the engine told how many tokens of the prompt it found in its cache."""
        return self.cached_tokens is not None and self.prompt_tokens > 0

    def grown_blocks(self, block_tokens: int) -> int:
        """Full blocks of so many tokens that the answer fills behind its prompt's own. Its last token is never fed
        back, and has no place in the cache."""
        if not self.completion_tokens or not block_tokens:
            return 0
        behind = self.prompt_tokens + self.completion_tokens - 1
        return behind // block_tokens - self.prompt_tokens // block_tokens


class Ending(StrEnum):
    """How an attempt on a replica ended."""

    OK = "ok"
    REFUSED_BY_ENGINE = "refused"  # a 4xx: the request's fault, not the replica's
    FAILED = "failed"  # the replica's fault
    UNREACHED = "unreached"  # nothing was sent and nothing heard: the fault of the replica, or of the network
    CLIENT_LEFT = "client_left"  # the client left: nobody's fault


class Outcome(Struct, gc=False):
    """What became of a lease."""

    ending: Ending
    usage: Usage | None = None
    events: int = 0  # streamed events: tokens, where usage is not reported
    unseen: bool = False  # the answer did not come by here: how many tokens it had is not known


class Receipt(Struct, gc=False):
    """What the client, the log and `/admin/decisions` are told of a placement."""

    replica: str
    policy: str
    reason: Reason
    grade: Grade
    prompt_tokens: int
    predicted_cached_tokens: int
    candidates: tuple[Candidate, ...] = ()  # the few candidates that explain the choice (placement/receipts.py)
    spill: str = ""  # why the longest holder was passed over (placement/spill.py)
    spilled_tokens: int = 0  # tokens that the longest holder holds and `replica` does not
    miss: Breakdown | None = None  # predicted misses by reason; None without an observatory
    replay: bool = False  # the very same prompt was asked for before, within the observatory's window
    seen_blocks: int = 0  # leading blocks that were computed before, on whatever replica
    at_hub: tuple[int, int] | None = None  # (lease, connection) under which the hub keeps the full receipt
    ttft_ms: float = 0.0  # predicted time to first token from here on, as often longer as shorter; 0: not known
    ttft_p90_ms: float = 0.0  # one in ten takes longer
    weighed: int = 0  # number of candidates that were weighed
    brought: Brought | None = None  # None: all of `predicted_cached_tokens` is on the GPU

    @property
    def predicted_tier_tokens(self) -> int:
        """Part of `predicted_cached_tokens` that is to be loaded from tiers."""
        return self.brought.tier_tokens if self.brought is not None else 0

    @property
    def pull(self) -> Pull | None:
        """The part of `predicted_cached_tokens` that comes from another replica; None for nothing."""
        return self.brought.pull if self.brought is not None else None

    @property
    def leg(self) -> PrefillLeg | None:
        """The replica that prefills the prompt and sends its blocks to `replica`; None where that does both."""
        return self.brought.leg if self.brought is not None else None

    def found(self, usage: Usage) -> Usage:
        """Usage as `replica` has told it, with what was found cached where the prompt was computed."""
        leg = self.leg
        if leg is None or leg.alone:
            return usage
        found = leg.found_tokens
        return usage.found_by(Usage(usage.prompt_tokens, 0, found) if found is not None else None)
