"""Placements as facts that nobody changes: candidates, the choice, receipts, outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from router.core.facts.misses import Breakdown


class Grade(StrEnum):
    """How far the router's belief about what a replica holds can be trusted."""

    EXACT = "exact"
    CATCHING_UP = "catching-up"
    ESTIMATED = "estimated"


class Reason(StrEnum):
    """Why a request went where it went; the values of `x-warmroute-reason`."""

    WARM = "warm"  # the replica that holds the longest part of the prompt
    SPILL = "spill"  # another holds more, but waiting there would cost more than computing again
    COLD = "cold"  # no replica holds any of it
    TIE = "tie"  # prices too close to tell apart: the hash ring decided
    ONLY = "only"  # one candidate
    POLICY = "policy"  # a policy that does not look at the cache
    RETRY = "retry"  # a second attempt, after the first replica failed


class Held(Exception):
    """A request is better placed later: what it would push out now is worth more than its waiting."""


class Shed(Exception):
    """A request is turned away, though replicas are there: the fleet is full, or its tenant has had its share."""

    def __init__(self, code: str, message: str, retry_after_s: float) -> None:
        """`code` is stable: `overloaded`, `rate_limited`. `retry_after_s`: when it may be worth asking again."""
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


class Candidate(Struct, gc=False):
    """A replica that may take the request, with everything a policy may weigh. Times are milliseconds."""

    id: str
    cached_tokens: int  # longest prefix believed held
    uncached_tokens: int
    pending_ms: float  # prefill work already sent there and not yet done, foreign waiting work included
    uncached_ms: float  # prefill of this request's uncached part
    evicted_ms: float  # work others would have to repeat: evicted tokens x chance that they are asked for again
    kv_wait_ms: float  # until the KV pool has room for this request
    in_flight: int  # open leases
    footprint_blocks: int = 0  # blocks it is believed to hold
    grade: Grade = Grade.ESTIMATED  # of `cached_tokens`
    estimated_tokens: int = 0  # what our own estimate says is cached, whatever the events say
    evicted_again_ms: float = 0.0  # and what those would repeat whom that pushes out in its turn, and so on
    decode_ms: float = 0.0  # from this answer's first token to its last, in the company that it would have there
    slowed_ms: float = 0.0  # by which its steps would slow the answers that decode there, all of them together
    stalled_ms: float = 0.0  # by which its prefill would interrupt them, all of them together
    price_ms: float = 0.0  # what the policy made of all that, set by those that compare prices


class Question(Struct, gc=False):
    """What a policy is asked, besides the candidates."""

    ring_key: str  # session hint, else the chain key behind the first user message
    tie_ms: float  # prices closer than this cannot be told apart
    unit_ms: float  # learned time of BACKLOG_TOKENS of prefill: what a queue is measured in
    backlog: float  # mean time until what waits for prefill at a replica is done, in units
    median_backlog: float = 0.0  # the median of these times, in units: one long prompt does not make the fleet busy
    replicas: int = 0  # number of replicas that may take the request, candidates or not
    in_flight: int = 0  # open leases of all of them
    footprint_blocks: int = 0  # blocks that all of them are believed to hold
    home: str = ""  # replica that gave the conversation's last answer
    elsewhere: float = 0.0  # chance that another router sent an unknown prompt's beginning to its place on the ring
    order: Sequence[str] = ()  # ids of all replicas, the nearest to the ring key first; () where all are candidates


class Choice(Struct, gc=False):
    """A policy's answer. `tied` says that the ring, not the price, decided; `guessed` that nobody is known to hold the
    prompt, and its place on the ring was taken, where other routers would have sent it too; `hold` that it is better
    not placed at all for now."""

    id: str
    tied: bool = False
    guessed: bool = False
    hold: bool = False


class Usage(Struct, gc=False):
    """Token counts as the engine reports them; `cached_tokens` is None where its flags keep it silent."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Ending(StrEnum):
    """How an attempt on a replica ended."""

    OK = "ok"
    REFUSED_BY_ENGINE = "refused"  # a 4xx: the request's fault, not the replica's
    FAILED = "failed"  # the replica's fault
    UNREACHED = "unreached"  # nothing was heard of it, and nothing sent: its fault, or the network's
    CLIENT_LEFT = "client_left"  # nobody's fault


class Outcome(Struct, gc=False):
    """What became of a lease."""

    ending: Ending
    usage: Usage | None = None
    events: int = 0  # streamed events: tokens, where usage is not reported


class Receipt(Struct):
    """What the client, the log and `/admin/decisions` are told of a placement."""

    replica: str
    policy: str
    reason: Reason
    grade: Grade
    prompt_tokens: int
    predicted_cached_tokens: int
    candidates: tuple[Candidate, ...] = ()  # of those that were weighed, the few that tell most: see receipts.py
    spill: str = ""  # why the longest holder was passed over: see spill.py
    spilled_tokens: int = 0  # that it holds and `replica` does not
    miss: Breakdown | None = None  # as predicted; None without an observatory
    replay: bool = False  # the very same prompt was asked for before, within the observatory's window
    seen_blocks: int = 0  # that its prompt begins with and that were computed before, on whatever replica
    at_hub: tuple[int, int] | None = None  # who has the whole, candidates too: under this lease, of this connection
    weighed: int = 0  # candidates that there were
