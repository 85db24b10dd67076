"""The nouns that every other module speaks in: facts, no behaviour beyond their own arithmetic.

Nobody changes one. Those of which each request makes some are msgspec Structs, made in less than half the time that a
dataclass takes, which is a fraction of a frozen one's. Where no cycle can arise they say `gc=False`: the collector,
which runs the more often the more is made, does not count them. Compiled they are C's (deploy/compiled_sources.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

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


class Priority(IntEnum):
    """Whose turn it is when the fleet is full; by name in `x-warmroute-priority`."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class Held(Exception):
    """A request is better placed later: what it would push out now is worth more than its waiting."""


class Shed(Exception):
    """A request is turned away, though replicas are there: the fleet is full, or its tenant has had its share."""

    def __init__(self, code: str, message: str, retry_after_s: float) -> None:
        """`code` is stable: `overloaded`, `rate_limited`. `retry_after_s`: when it may be worth asking again."""
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


RANK_MARK = "#dp"  # begins a URL's fragment, which no base URL has


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine as discovery reports it; its id is stable across routers.

    `id` is the base URL without a trailing slash. Where one server runs several data-parallel ranks, each with a
    cache of its own, every rank is a replica with the id `{base URL}#dp{rank}`.
    """

    id: str
    instance: str = ""  # of the engine that is there now; another one at the same address holds nothing of the first's
    name: str = ""  # what people call it: `namespace/pod`
    node: str = ""  # the machine that it runs on
    events: str = ""  # where it publishes KV events, if discovery knows: tcp://10.0.0.1:5557
    replay: str = ""  # likewise, and only with `events`
    ready: bool = True  # False: nothing new is to be sent there, by discovery; what it holds it still holds

    @property
    def url(self) -> str:
        """Base URL to which a request's path is appended: that of the server, the same for all its ranks."""
        return self.id.partition(RANK_MARK)[0]

    @property
    def rank(self) -> int | None:
        """The data-parallel rank, counted from 0 within this server; None where it has only one."""
        rank = self.id.partition(RANK_MARK)[2]
        return int(rank) if rank else None

    def of_rank(self, rank: int) -> Replica:
        """One rank of this server."""
        return replace(self, id=f"{self.url}{RANK_MARK}{rank}")

    def is_another(self, before: Replica) -> bool:
        """Whether this is another engine at the same address; where one of the two is not known, nothing says so."""
        return bool(self.instance and before.instance and self.instance != before.instance)

    def after(self, before: Replica) -> Replica:
        """The same engine, as far as known, with the facts of today: an instance that was known still is."""
        return self if self.instance or not before.instance else replace(self, instance=before.instance)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One row of an engine's `/v1/models`. `parent` is set for a LoRA adapter (vLLM, SGLang)."""

    name: str
    root: str | None = None
    parent: str | None = None
    max_model_len_tokens: int | None = None
    created: int = 0
    owned_by: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine's `/metrics` says of itself; None where it does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  # 0..1, blocks in use by live requests
    kv_tokens_max: int | None = None  # capacity of the KV pool
    block_tokens: int | None = None  # the engine's own block (page) size
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    cache_query_tokens_total: float | None = None
    cache_hit_tokens_total: float | None = None
    prefix_caching: bool | None = None  # False: nothing is ever held


OPAQUE_BYTES = 1_024  # canonical bytes that stand for one part of a prompt which is no text, such as an image


@dataclass(slots=True, eq=False)
class Beginning:
    """Where a message of a prompt ended: prompts that begin alike up to there share one. Sizes are canonical bytes
    behind the prompt's head (tools and template arguments), of which two such prompts may have different ones.
    """

    size: int
    first_user_end: int  # 0 where no message was the user's
    spans: tuple[tuple[int, int], ...]  # of the latest assistant messages
    opaque_bytes: int
    hint_bytes: int = 0  # behind the last breakpoint before the first user message's end; 0: none
    # What `chain_of` knows of it, by root and head: none of it is a fact of the prompt's.
    chains: dict[tuple[int, bytes], Any] = field(default_factory=dict, repr=False)


# What stands before a prompt's messages: its canonical bytes; where the last breakpoint in them is; and `arguments` and
# `fewer_tools` (see Prompt).
Heading = tuple[bytes, int, tuple[int, int], tuple[int, bytes] | None]


@dataclass(slots=True, eq=False)
class Joint:
    """How a prompt hangs together with prompts read before."""

    head: bytes  # canonical bytes before the first message
    before: Beginning | None  # behind which the prompt's `text` begins; None: `text` is all of it
    ends: list[Beginning]  # ends of messages in `text` that later prompts may ask for
    whole: Callable[[], Prompt | None]  # reads it all again, should the chain of `before` not be known


class Prompt(Struct, eq=False):
    """What the chat template will see, as canonical bytes.

    Turn n+1 of an append-only conversation starts with all bytes of turn n. `first_user_end` is the offset behind
    the first user message; `assistant_spans` are (start, end) offsets of assistant messages, in order.
    `opaque_bytes` counts bytes that stand for something else, OPAQUE_BYTES for each part (an image's digest): they say
    nothing of bytes per token.
    `arguments` is (start, end) of the template's arguments, which the ring does not look at. `fewer_tools`: so many
    leading bytes are tools, and what stands there instead on engines that leave out tools that may not be called; None
    where all may be.
    `bytes_per_token` is set where it is known, not learned: a prompt given as token ids.
    `hint_bytes` is the offset behind the last `cache_control` breakpoint before the end of the first user message: what
    is marked there is the client's template; what is marked later, only its conversation. 0: none.
    Where its beginning was read before (`joint`), `text` is only what stands behind that, and only the latest
    assistant messages are told; offsets count from the prompt's first byte in any case.
    """

    text: bytes
    first_user_end: int
    assistant_spans: tuple[tuple[int, int], ...] = ()
    opaque_bytes: int = 0
    bytes_per_token: float | None = None
    skipped_bytes: int = 0  # of the prompt, before `text`
    arguments: tuple[int, int] = (0, 0)
    fewer_tools: tuple[int, bytes] | None = None
    hint_bytes: int = 0
    joint: Joint | None = None

    def __eq__(self, other: object) -> bool:
        """Whether they are the same, however they hang together with others, and whatever is marked in them."""
        return isinstance(other, Prompt) and _same(self, other, self.__struct_fields__[:-2])

    __hash__ = None  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """Canonical bytes of the whole prompt."""
        return self.skipped_bytes + len(self.text)

    def let_go(self) -> None:
        """Drop the text, which nobody needs once it is hashed; sizes stay."""
        self.skipped_bytes, self.text, self.joint = self.size, b"", None


class Ask(Struct, eq=False):
    """A parsed request: only what placement needs to know of it."""

    model: str | None
    prompt: Prompt | None = None
    stream: bool = False
    salt: bytes = b""  # cache_salt and whatever else separates caches besides the model
    session: str | None = None  # prompt_cache_key; a session header comes from the proxy
    output_tokens_max: int | None = None
    stored: bool | None = None  # `store`; the Responses API keeps answers unless it is false
    response_id: str | None = None  # previous_response_id: belongs to the replica that made it
    wants_usage: bool = False  # usage will be in its stream: the client asked, or it always is
    metadata: bytes = b""  # the body's own, JSON; dropped once `step` is read
    step: str = ""  # which step of an agent it says to be
    decoded: object = None  # the dialect's own, for its `template_input`

    def __eq__(self, other: object) -> bool:
        """Whether they ask for the same, whatever they were decoded to."""
        return isinstance(other, Ask) and _same(self, other, self.__struct_fields__[:-1])

    __hash__ = None  # type: ignore[assignment]

    @property
    def hint_bytes(self) -> int:
        """Where the client says that its template ends (`Prompt`); 0: nowhere."""
        return self.prompt.hint_bytes if self.prompt is not None else 0


def _same(one: object, other: object, fields: tuple[str, ...]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in fields)


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


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What an engine makes a prompt's token ids of. Exactly one of `ids`, `text` and `messages` is set.

    `messages` are OpenAI chat messages, whatever API the request came through, before the engine fits them to its
    template: `content` is absent, None, a string or a list of text parts; the arguments of tool calls are JSON text,
    or what it decodes to. `tools` are as the request has them, wrapped as OpenAI's chat API does.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    reasoning_effort: str | float | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    text: str | None = None
    ids: bytes | None = None  # uint32 little-endian
    add_special_tokens: bool = False  # what the tokenizer puts around any text, such as BOS
    api: str = "chat"  # "chat", "messages" or "responses": engines fit their messages differently
    thinking_off: bool = False  # Messages: vLLM asks the template which effort that is
