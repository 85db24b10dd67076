"""A lease: the promise that a replica works on a request, from placement to the end of the answer."""

from __future__ import annotations

from msgspec import Struct

from router.core.cache.reported import StoredPrefix
from router.core.facts.placements import Receipt
from router.core.learned.steps import ClockReading, Stretch
from router.core.prompts.token_keys import TokenPrompt

PREFILL = "prefill"  # the role of a lease whose answer nobody reads
DECODE = "decode"  # the role of a lease whose prompt another replica prefills


class PrefillBatch(Struct, gc=False, eq=False):  # a Struct for speed: core/facts/requests.py
    """First tokens that came together: engines prefill what waits side by side, and only the whole batch takes time."""

    before_s: float  # time of the last first token before this batch
    since_s: float  # time at which the batch before was done and one of these prompts was placed
    until_s: float
    tokens: int  # computed tokens of all their prompts
    others_tokens: int = 0  # computed tokens of prompts of other routers in the same batch


class ToLoad(Struct, gc=False, eq=False):
    """What a lease's replica brings to its GPU before it computes the rest of the prompt."""

    tokens: dict[str, int]  # by tier
    modelled_ms: float  # with the loads before it
    alone: bool  # no long prefill was there when it was placed, and its load need not wait for room
    took_ms: float | None = None  # time that it took; None where that is not known


class Lease(Struct, gc=False, eq=False):  # a Struct for speed: core/facts/requests.py
    """A promise that a replica is working on a request, from placement to the end of the answer.

    `role` is what the replica does for it: a request that one replica prefills and another one decodes has two leases.
    """

    id: int
    replica: str
    receipt: Receipt
    placed_s: float
    model: str
    streams: bool
    prompt_tokens: int
    cached_tokens: int
    credited_tokens: int  # cached tokens that were credited from a past answer at this placement
    prefill_ms: float
    own_tokens: int  # prompt tokens behind what may be shared in the KV pool (kv_room.py)
    keys: list[int]
    end_key: int | None
    text_bytes: int  # bytes whose ratio to tokens is worth learning; 0 when not
    answer_tokens_max: int = 0  # believed of the answer, whatever the engine says
    tokens: TokenPrompt | None = None  # the prompt's own ids, where they are known
    stored: StoredPrefix | None = None  # stored prefix of the prompt, by events alone
    guessed: bool = False  # placed on a guess (Choice.guessed)
    stall_ms: float = 0.0  # part of `prefill_ms` by which it interrupts each stream that decodes there
    role: str = "both"
    first_token_s: float | None = None
    batch: PrefillBatch | None = None  # prefill batch of its first token
    batch_tokens: int = 0  # tokens of this prompt in that batch
    queued: bool = True  # whether others waited at the replica when it was placed
    own_ms: float | None = None  # service time of the prompt's own prefill; None where that is not known
    mark: ClockReading | None = None  # the replica's clock when its answer began to decode
    stretch: Stretch | None = None  # how its answer decoded, once that is over
    opaque_bytes: int = 0  # bytes that stand for images and the like, whose tokens are worth learning
    expected_ms: float = 0.0  # time to its first token by the terms of its price
    conversation: int = 0  # name of its conversation (placement/conversations.py); 0: none is known
    own_at: int = 0  # leading blocks of its prompt that others had asked for before that conversation began
    final: bool = False  # nothing of that conversation will be asked for again
    others_tokens: int = 0  # tokens that other routers had computed there, as heard when it was placed
    faded: int = 0  # how often the counts behind the replica's share had faded when it was placed
    to_load: ToLoad | None = None  # part of its cached tokens that is behind the GPU; None where none is
    # Since when it waits behind another router's prompt with the same beginning, or of a decode leg since when its
    # prompt is prefilled; 0: never.
    turn_s: float = 0.0

    @property
    def queued_s(self) -> float:
        """Time at which it took its place in the replica's queue."""
        return self.turn_s if self.turn_s > self.placed_s else self.placed_s  # noqa: FURB136 - half the time

    @property
    def loading_ms(self) -> float:
        """Modelled time until what is not on the GPU is there, from tiers or another replica; 0 where all is."""
        load, pull = self.to_load, self.receipt.pull
        return (load.modelled_ms if load is not None else 0.0) + (pull.fetch_ms if pull is not None else 0.0)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that the replica must compute."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def service_ms(self) -> float | None:
        """Milliseconds of its batch's prefill that are the prompt's share, by tokens; None before the first token, and
        where nothing is known of prompts' sizes."""
        batch = self.batch
        if batch is None or not batch.tokens:
            return None
        tokens = batch.tokens + batch.others_tokens
        return (batch.until_s - batch.since_s) * 1e3 * self.batch_tokens / tokens

    def recount(self, computed_tokens: int) -> None:
        """The engine says how much of its prompt was computed: that is its part of the batch, not what was believed."""
        if self.batch is not None:
            self.batch.tokens += computed_tokens - self.batch_tokens
            self.batch_tokens = computed_tokens


class Timed(Struct, gc=False):
    """A first token, against what the fleet's model said."""

    at_s: float
    took_ms: float
    queued: bool
    expected_ms: float  # expected by the fleet's model
