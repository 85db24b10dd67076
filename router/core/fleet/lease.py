"""Leases: records that a replica works on a request, from placement to the end of the answer."""

from __future__ import annotations

from msgspec import Struct

from router.core.cache_state.event_state import StoredPrefix
from router.core.estimators.decode_step import ClockReading, DecodeInterval
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Receipt

PREFILL = "prefill"  # role of a lease of the prefill stage; its answer is discarded
DECODE = "decode"  # role of a lease of the decode stage; another replica prefills its prompt


class PrefillBatch(Struct, gc=False, eq=False):  # a Struct for speed: core/types/requests.py
    """First tokens that arrived together. An engine prefills waiting prompts concurrently, so only the time of the
    whole batch can be measured."""

    before_s: float  # time of the last first token before this batch
    since_s: float  # time at which the previous batch was complete and one of these prompts was placed
    until_s: float
    tokens: int  # computed tokens of all its prompts
    others_tokens: int = 0  # computed tokens of prompts of other routers in the same batch


class PendingTierLoad(Struct, gc=False, eq=False):
    """Cached blocks that a lease's replica loads to its GPU before it computes the rest of the prompt."""

    tokens: dict[str, int]  # by tier
    modelled_ms: float  # including the loads before it
    alone: bool  # no long prefill was running at its placement, and its load need not wait for KV capacity
    took_ms: float | None = None  # measured time; None if unknown


class LeasePrompt(Struct, gc=False, eq=False):
    """Prompt of a lease: its blocks and token ids, and the estimate of its length."""

    keys: list[int]
    unshared_tokens: int  # prompt tokens after the part that may be shared in the KV pool (kv_reservations.py)
    end_key: int | None = None
    text_bytes: int = 0  # bytes to learn the ratio of tokens from; 0 if they are unsuitable
    opaque_bytes: int = 0  # bytes that stand for images and the like, to learn the ratio of tokens from
    credited_tokens: int = 0  # cached tokens credited from a past answer at this placement
    token_ids: TokenPrompt | None = None  # the prompt's own token ids, if known
    stored: StoredPrefix | None = None  # stored prefix of the prompt, by events alone


class LeaseConversation(Struct, gc=False, eq=False):
    """Conversation of a lease's request."""

    name: int  # placement/conversation_affinity.py
    shared_prefix_blocks: int  # leading blocks of its prompt that were requested before that conversation began
    final: bool  # no further request of that conversation is expected


class LeaseMeasurements(Struct, gc=False, eq=False):
    """Measured times of a lease's prefill and decode, and readings of the replica's counters at its placement."""

    queued: bool = True  # other requests waited at the replica at its placement
    others_tokens: int = 0  # tokens that other routers had computed there, as received before placement
    decay_count: int = 0  # number of decays of the counts behind the replica's share at placement
    batch: PrefillBatch | None = None  # prefill batch of its first token
    batch_tokens: int = 0  # tokens of this prompt in that batch
    own_ms: float | None = None  # service time of the prompt's own prefill; None if unknown
    decode_start: ClockReading | None = None  # the replica's clock when the answer began to decode
    decode_stats: DecodeInterval | None = None  # decode measurement of its answer, once it has ended

    @property
    def service_ms(self) -> float | None:
        """Milliseconds of its batch's prefill that belong to this prompt, by tokens; None before the first token, and
        if the sizes of prompts are unknown."""
        batch = self.batch
        if batch is None or not batch.tokens:
            return None
        tokens = batch.tokens + batch.others_tokens
        return (batch.until_s - batch.since_s) * 1e3 * self.batch_tokens / tokens

    def recount(self, computed_tokens: int) -> None:
        """Correct its part of the batch, which was an estimate, to the number of tokens that the engine reports as
        computed."""
        if self.batch is not None:
            self.batch.tokens += computed_tokens - self.batch_tokens
            self.batch_tokens = computed_tokens


class Lease(Struct, gc=False, eq=False):  # a Struct for speed: core/types/requests.py
    """Record that a replica works on a request, from placement to the end of the answer.

    `role` is the replica's part of the work: a request that two replicas serve has two leases.
    """

    id: int
    replica: str
    receipt: Receipt
    placed_s: float
    model: str
    streams: bool
    prompt: LeasePrompt
    prompt_tokens: int
    cached_tokens: int
    prefill_ms: float
    measurements: LeaseMeasurements
    answer_tokens_max: int = 0  # estimated limit of the answer, independent of the engine's limit
    stall_ms: float = 0.0  # part of `prefill_ms` by which it stalls each stream that decodes there
    role: str = "both"
    guessed: bool = False  # placed on a guess (Choice.guessed)
    expected_ms: float = 0.0  # time to its first token, from the components of its price
    first_token_s: float | None = None
    conversation: LeaseConversation | None = None  # None if unknown
    to_load: PendingTierLoad | None = None  # cached tokens in tiers outside the GPU; None without any
    # The time from which it waits for another router's prompt with the same prefix; for a lease of the decode stage,
    # the time at which its prompt is prefilled. 0: neither.
    effective_start_s: float = 0.0

    @property
    def queued_s(self) -> float:
        """Time at which it took its place in the replica's queue."""
        return max(self.effective_start_s, self.placed_s)

    @property
    def loading_ms(self) -> float:
        """Modelled time until all cached blocks are on the GPU, from tiers or another replica; 0 if all are there."""
        load, pull = self.to_load, self.receipt.pull
        return (load.modelled_ms if load is not None else 0.0) + (pull.fetch_ms if pull is not None else 0.0)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that the replica must compute."""
        return self.prompt_tokens - self.cached_tokens
