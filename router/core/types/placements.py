"""Types of a placement: candidates, the choice, receipts, outcomes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from router.core.types.cache_misses import TokenBreakdown
from router.core.types.disagg_types import PrefillStage


class Confidence(StrEnum):
    """Confidence in the router's estimate of a replica's cached blocks."""

    EXACT = "exact"
    CATCHING_UP = "catching-up"
    ESTIMATED = "estimated"
    UNSEEN = "unseen"  # estimated, and answers that would correct the estimate do not pass this router


REPLICA_GRADES = (
    Confidence.EXACT,
    Confidence.CATCHING_UP,
    Confidence.ESTIMATED,
)  # grades of replicas; the others are grades of requests


class PlacementReason(StrEnum):
    """Reason of a placement; the values of `x-warmroute-reason`."""

    WARM = "warm"  # the replica with the longest cached part of the prompt
    SPILL = "spill"  # another replica has more cached, but waiting there would cost more than computing here
    COLD = "cold"  # no replica has any of the prompt cached
    TIE = "tie"  # equal prices within their accuracy: the hash ring decided
    ONLY = "only"  # one candidate
    POLICY = "policy"  # a policy that ignores the cache
    RETRY = "retry"  # a second attempt, after the first replica failed
    PULL = "pull"  # another replica has more cached, and its memory sends that to this one
    SPLIT = "split"  # another replica prefills it, and sends the blocks to this one


class Deferred(Exception):
    """A request should be deferred: placing it now would evict more work than its waiting costs."""


class Shed(Exception):
    """A request is refused although replicas exist: the fleet is full, or its tenant has reached its limit."""

    def __init__(self, code: str, message: str, retry_after_s: float) -> None:
        """Create the refusal of a request.

        - `code`: stable text, `overloaded` or `rate_limited`.
        - `retry_after_s`: time after which a retry may succeed.
        """
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


class Pull(Struct, gc=False):
    """Tokens of a prompt that a replica can fetch from another replica's CPU memory. Times are milliseconds."""

    source: str  # replica that has them
    address: str  # address at which the engine there accepts its peers' requests: `host:port`
    tokens: int  # length of that part of the prompt, which begins at the end of the replica's own cached part
    fetch_ms: float  # time until they have arrived, including the transfers before it on the same link
    uncached_ms: float  # prefill time of the remaining tokens
    stalled_ms: float  # sum of delays that this prefill causes for the answers that decode there
    alone: bool = False  # no long prefill was running there at placement, and it need not wait for KV capacity
    took_ms: float | None = None  # measured time; None if unknown


class FirstTokenExtras(Struct, gc=False):
    """What delays a candidate's first token beside its queue and its prefill. Most candidates have nothing of it."""

    tier_tokens: int = 0  # part of `cached_tokens` that must be loaded to the GPU from other tiers
    loading_ms: float = 0.0  # time of that load, and of the loads before it
    delay_ms: float = 0.0  # time by which first tokens come later than waiting work and prefill explain


class ExternalKv(Struct, gc=False):
    """Parts of `Receipt.predicted_cached_tokens` that are not on the replica's GPU yet."""

    tier_tokens: int = 0  # to load from its own tiers
    pull: Pull | None = None  # to fetch from another replica; None: no transfer
    leg: PrefillStage | None = None  # the replica that prefills the prompt; None: the decoding replica itself


class Cost(Struct, gc=False):
    """Terms of a placement's price: milliseconds that this request and others wait, already weighted.

    docs/architecture/price.md has their meaning (core/placement/policies/warm/cost.py).
    """

    wait_ms: float  # until the prompt's prefill begins
    uncached_ms: float  # prefill of the prompt's uncached part
    load_ms: float  # delays of the requests in the queue
    room_ms: float  # delays of requests that wait for KV capacity
    evicted_ms: float  # work that is repeated because the placement evicts blocks
    evicted_again_ms: float  # work that the repeated work evicts
    stalled_ms: float  # delays that the prefill causes for the answers that decode there
    decode_ms: float  # the answer after its first token
    slowed_ms: float  # delays that the answer causes for the answers that decode there
    transfer_ms: float = 0.0  # P2P transfer of a part of the prompt from another replica

    def total(self) -> float:
        """Return the price."""
        return (
            self.wait_ms
            + self.uncached_ms
            + self.load_ms
            + self.room_ms
            + self.evicted_ms
            + self.evicted_again_ms
            + self.stalled_ms
            + self.decode_ms
            + self.slowed_ms
            + self.transfer_ms
        )


class Candidate(Struct, gc=False):
    """One replica that may take the request, with the cost of a placement there. Times are milliseconds."""

    id: str
    cached_tokens: int  # longest prefix of the prompt estimated as cached at the replica
    uncached_tokens: int
    pending_ms: float  # prefill time of the waiting work, including other routers'
    uncached_ms: float  # prefill time of this prompt's uncached part
    evicted_ms: float  # work that others would repeat: evicted tokens x probability that they are requested again
    kv_wait_ms: float  # time until the KV pool has capacity for this request
    in_flight: int  # open leases
    grade: Confidence = Confidence.ESTIMATED  # confidence in `cached_tokens`
    estimated_tokens: int = 0  # cached tokens by our own estimate alone, independent of events
    evicted_again_ms: float = 0.0  # work repeated because the repeated work evicts other blocks, recursively
    decode_ms: float = 0.0  # time from this answer's first token to its last, with the answers that decode there
    slowed_ms: float = 0.0  # sum of delays that this answer's decoding steps cause for the answers that decode there
    stalled_ms: float = 0.0  # sum of delays that this prompt's prefill causes for the answers that decode there
    price_ms: float = 0.0  # price that the policy computes from all these terms; 0 if it compares none
    # sum of delays that the KV capacity in use by this answer causes for requests that wait for it
    room_ms: float = 0.0
    extras: FirstTokenExtras | None = None  # None: all its cached blocks are on its GPU, and it has no delay

    @property
    def wait_ms(self) -> float:
        """Time until the prefill can begin: the prefills before it are done, the KV pool has space, and the request has
        passed what delays first tokens."""
        return max(self.pending_ms, self.kv_wait_ms, self.delay_ms)

    @property
    def first_token_ms(self) -> float:
        """Time to the first token: the wait, the load from tiers and the prefill."""
        return self.wait_ms + self.loading_ms + self.uncached_ms

    @property
    def tier_tokens(self) -> int:
        """Part of `cached_tokens` that must be loaded from tiers outside the GPU."""
        return self.extras.tier_tokens if self.extras is not None else 0

    @property
    def loading_ms(self) -> float:
        """Time of the load from tiers, and of the loads before it."""
        return self.extras.loading_ms if self.extras is not None else 0.0

    @property
    def delay_ms(self) -> float:
        """Time by which its first tokens come later than its waiting work and their prefill explain."""
        return self.extras.delay_ms if self.extras is not None else 0.0


class Pricing(Protocol):
    """Prices of one placement, as its policy compared them."""

    def cost(self, candidate: Candidate) -> Cost:
        """Return the weighted terms of a candidate's price."""


class DisaggPlan(Struct, gc=False):
    """A request with disaggregated prefill, and its cost."""

    prefill: Candidate
    decode: Candidate
    transfer_ms: float  # time until the blocks are at the decoding replica, once they are computed
    price_ms: float  # price of both stages, comparable with a candidate's

    @property
    def expected_ms(self) -> float:
        """Milliseconds from the placement to the first token."""
        first, second = self.prefill, self.decode
        computed_ms = first.wait_ms + first.loading_ms + first.uncached_ms
        return max(computed_ms + self.transfer_ms, second.pending_ms, second.kv_wait_ms)


class PlacementContext(Struct, gc=False):
    """Placement context: the policy's input on the request and the fleet, in addition to the candidates."""

    ring_key: str  # session hint; without one the chain key after the first user message
    tie_ms: float  # price differences below this count as ties
    unit_ms: float  # learned time of BACKLOG_TOKENS of prefill: the unit of queue lengths
    backlog: float  # mean time until the waiting prefill at a replica is complete, in units
    median_backlog: float = 0.0  # median of the same times, in units: one long prompt does not make the fleet busy
    replicas: int = 0  # number of replicas that may take the request, candidates or not
    in_flight: int = 0  # open leases of all these replicas
    last_replica: str = ""  # affinity: the replica that gave the conversation's last answer
    other_router_probability: float = (
        0.0  # probability that another router placed the beginning of an unknown prompt by the ring
    )
    expected_replica: str = (
        ""  # replica that probably has a part of the prompt cached, by the client's information; "": none
    )
    ring_order: Sequence[str] = ()  # ids of all replicas, the nearest to the ring key first; () if all are candidates
    # Ids of replicas that this router prefers among equals; other routers prefer the rest. Empty without other routers.
    preferred_replicas: Collection[str] = ()


class PolicyDecision(Struct, gc=False):
    """A policy's decision.

    - `tied`: the ring decided, not the price.
    - `guessed`: no replica is known to have the prompt cached. The ring decided, because other routers would have used
      it too.
    - `hold_back`: the request should be deferred.
    - `rule`: name of the rule that decided; "" if the policy names none.
    - `pricing`: the prices that the policy compared; None if it compares none.
    """

    id: str
    tied: bool = False
    guessed: bool = False
    hold_back: bool = False
    rule: str = ""
    pricing: Pricing | None = None


class Usage(Struct, gc=False):
    """Token counts as the engine reports them; `cached_tokens` is None if the engine's flags disable that count."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def with_prefill_hits(self, prefill: Usage | None) -> Usage:
        """Return the usage of a decode stage with the cached tokens of its prefill stage.

        With most KV connectors, the decoding engine counts all transferred tokens as cached. If the prefill stage
        reported no count, it is unknown.
        """
        found = None
        if prefill is not None and prefill.cached_tokens is not None:
            found = min(prefill.cached_tokens, self.prompt_tokens)
        return Usage(self.prompt_tokens, self.completion_tokens, found)

    @property
    def verified(self) -> bool:
        """True if the engine reported the number of cached prompt tokens."""
        return self.cached_tokens is not None and self.prompt_tokens > 0

    def answer_blocks(self, block_tokens: int) -> int:
        """Return the number of full blocks that the answer fills after its prompt's own. Its last token is never fed
        back to the model, and has no place in the cache."""
        if not self.completion_tokens or not block_tokens:
            return 0
        behind = self.prompt_tokens + self.completion_tokens - 1
        return behind // block_tokens - self.prompt_tokens // block_tokens


class EndReason(StrEnum):
    """End of an attempt on a replica."""

    OK = "ok"
    REFUSED_BY_ENGINE = "refused"  # a 4xx: the request's fault, not the replica's
    FAILED = "failed"  # the replica's fault
    UNREACHED = "unreached"  # no byte was exchanged: the fault of the replica, or of the network
    CLIENT_LEFT = "client_left"  # the client left, which is no fault of the replica


class Outcome(Struct, gc=False):
    """Outcome of a lease."""

    ending: EndReason
    usage: Usage | None = None
    events: int = 0  # streamed events: used as tokens if usage is not reported
    unobserved: bool = False  # the answer did not pass this router: its number of tokens is unknown


class Receipt(Struct, gc=False):
    """Record of a placement for the client, the log and `/admin/decisions`."""

    replica: str
    policy: str
    reason: PlacementReason
    grade: Confidence
    prompt_tokens: int
    predicted_cached_tokens: int
    candidates: tuple[Candidate, ...] = ()  # the few candidates that explain the choice (placement/receipts.py)
    spill: str = ""  # reason to pass over the longest holder (placement/spill.py)
    spilled_tokens: int = 0  # tokens that the longest holder has cached and `replica` does not
    miss: TokenBreakdown | None = None  # predicted misses by reason; None without an observatory
    replay: bool = False  # an identical prompt was requested before, within the observatory's window
    seen_blocks: int = 0  # leading blocks that were computed before, on any replica
    ttft_ms: float = 0.0  # predicted median time to first token from the placement; 0: unknown
    ttft_p90_ms: float = 0.0  # predicted 90th percentile of the same time
    weighed: int = 0  # number of candidates that were priced
    brought: ExternalKv | None = None  # None: all of `predicted_cached_tokens` is on the GPU
    rule: str = ""  # rule of the policy that decided; "" if it names none
    pricing: Pricing | None = None  # prices of `candidates`; None if the policy compares none

    @property
    def predicted_tier_tokens(self) -> int:
        """Part of `predicted_cached_tokens` that must be loaded from tiers."""
        return self.brought.tier_tokens if self.brought is not None else 0

    @property
    def delay_ms(self) -> float:
        """Unexplained delay of first tokens at `replica`, as known at the placement."""
        return next((each.delay_ms for each in self.candidates if each.id == self.replica), 0.0)

    @property
    def pull(self) -> Pull | None:
        """The part of `predicted_cached_tokens` that comes from another replica; None without a transfer."""
        return self.brought.pull if self.brought is not None else None

    @property
    def leg(self) -> PrefillStage | None:
        """The replica that prefills the prompt and sends its blocks to `replica`; None if `replica` does both."""
        return self.brought.leg if self.brought is not None else None

    @property
    def prefill_replica(self) -> str:
        """The replica that computes the prompt."""
        leg = self.leg
        return leg.replica if leg is not None else self.replica

    @property
    def other_replicas(self) -> tuple[str, ...]:
        """The replicas beside `replica` that compute a stage of the request."""
        leg = self.leg
        return (leg.replica,) if leg is not None else ()

    def stage_fields(self, prefix: str = "") -> dict[str, str]:
        """Return the fields of spans and final receipts on the other stages of the request; none without them."""
        leg = self.leg
        return {f"{prefix}prefill_replica": leg.replica} if leg is not None else {}

    def prefill_ms(self, alone_ms: float) -> float:
        """Return the predicted prefill time of the prompt's uncached part, which is `alone_ms` at `replica`."""
        leg = self.leg
        return leg.uncached_ms if leg is not None else alone_ms

    def first_token_ms(self, chosen: Candidate) -> float:
        """Return the predicted time to the first token. `chosen`: the candidate of `replica`."""
        leg = self.leg
        return chosen.first_token_ms if leg is None else leg.pending_ms + leg.uncached_ms + leg.transfer_ms

    def cost_of(self, candidate: Candidate) -> Cost | None:
        """Return the terms of a candidate's price; None if the policy compared no prices, or not this one.

        The chosen candidate of a P2P transfer has the terms that are left with it, and the time of the transfer.
        """
        if self.pricing is None or not candidate.price_ms:
            return None
        cost = self.pricing.cost(candidate)
        if self.pull is not None and candidate.id == self.replica:
            cost.transfer_ms = self.pull.fetch_ms
        return cost

    def adjust_usage(self, usage: Usage) -> Usage:
        """Return the usage that `replica` reported, with the count of cached tokens from the replica that computed the
        prompt."""
        leg = self.leg
        if leg is None or leg.alone:
            return usage
        found = leg.found_tokens
        return usage.with_prefill_hits(Usage(usage.prompt_tokens, 0, found) if found is not None else None)


def stage_row(receipt: Receipt | None) -> dict[str, str | float | None]:
    """Return the fields of a decision's row on the other stages of its request, empty without such stages."""
    leg = receipt.leg if receipt is not None else None
    return {
        "prefill_replica": leg.replica if leg is not None else None,
        "predicted_prefill_ms": round(leg.pending_ms + leg.uncached_ms, 2) if leg is not None else 0.0,
        "predicted_transfer_ms": round(leg.transfer_ms, 2) if leg is not None else 0.0,
    }
