"""Types of the cache observatory: reasons for computed prompt tokens, and differences between two prompts.

Every prompt token is a hit or has exactly one reason. Reasons are ranges of the prompt, from its beginning to its end,
so they add up by construction: hit + misses = prompt tokens.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class MissReason(StrEnum):
    """Reason for tokens that were not found in a replica's cache; reasons that operators or clients can fix come
    first."""

    DIVERGED = "diverged"  # an earlier prompt had these tokens too, after text that differs now
    EVICTED = "evicted"  # a replica had cached these tokens, and evicted them
    SPILLED = "spilled"  # another replica has cached these tokens, and computing them here was cheaper
    REPLICA_LOST = "replica_lost"  # the replica that had cached these tokens has left, or was restarted
    IDENTITY = "identity"  # the same prompt is cached for another model, adapter, salt or tenant
    MISPREDICTED = "mispredicted"  # the router predicted a hit, and the engine reported a miss
    UNSUPPORTED = "unsupported"  # the router cannot parse this prompt
    COLD = "cold"  # no earlier prompt has the same beginning
    NEW = "new"  # tokens after a prefix that was seen before: unavoidable
    TAIL = "tail"  # a partial block, and the last token, which engines always compute


class TokenFate(StrEnum):
    """Final place of a prompt token on its way from request to hit, in the order of that way.

    A reason (Miss) names the cause of a computed token, for the person who can fix it. A place also distinguishes the
    replica that had cached it in the meantime, and the source of a hit.
    """

    UNSUPPORTED = "unsupported"  # tokens of a prompt that the router cannot read
    NEVER_SEEN = "never_seen"  # no earlier prompt with the same beginning had these tokens
    TAIL = "tail"  # a partial block, and the last token, which engines always compute
    REWRITTEN = "rewritten"  # an earlier prompt had these tokens too, after text that differs now
    IDENTITY = "identity"  # tokens cached for another model, adapter, salt or tenant
    REPLICA_LOST = "replica_lost"  # the replica that had cached these tokens has left, or was restarted
    EVICTED_HERE = "evicted_here"  # the chosen replica evicted these tokens
    EVICTED_BY_OTHERS = "evicted_by_others"  # other replicas evicted these tokens
    CACHED_ON_OTHER_REPLICA = "cached_on_other_replica"  # another replica has cached these tokens, and was passed over
    # the replica's cache was predicted to have these tokens, and its engine did not find them
    MISPREDICTED = "mispredicted"
    TIER = "tier"  # tokens found in memory or files outside the GPU, and loaded
    PULLED = "pulled"  # tokens from another replica's memory
    REPLAY = "replay"  # tokens of a prompt that was requested before, found on the GPU
    GPU_HIT = "gpu_hit"  # tokens of a new prompt, found on the GPU


FUNNEL_STAGES = {
    "seen": (TokenFate.UNSUPPORTED, TokenFate.NEVER_SEEN, TokenFate.TAIL),
    "unchanged": (TokenFate.REWRITTEN, TokenFate.IDENTITY),
    "kept": (TokenFate.REPLICA_LOST, TokenFate.EVICTED_HERE, TokenFate.EVICTED_BY_OTHERS),
    "reached": (TokenFate.CACHED_ON_OTHER_REPLICA,),
    "hit": (TokenFate.MISPREDICTED,),
}
"""Stages of the way from request to hit, each with the places of the tokens that do not reach it. Places without a
stage are those of hits."""

AVOIDABLE = (
    MissReason.DIVERGED,
    MissReason.EVICTED,
    MissReason.SPILLED,
    MissReason.REPLICA_LOST,
    MissReason.IDENTITY,
    MissReason.MISPREDICTED,
)


class DifferenceKind(StrEnum):
    """Kind of the difference between a prompt and an earlier one."""

    TIMESTAMP = "timestamp"  # a date or a time of day
    IDENTIFIER = "identifier"  # a UUID, a request id
    COUNTER = "counter"  # a number that goes up
    TOOL_ORDER = "tool_order"  # the same tools in another order
    TOOL_ADDED = "tool_added"
    TOOL_REMOVED = "tool_removed"
    KEY_ORDER = "key_order"  # the same JSON object, its keys in another order
    WHITESPACE = "whitespace"
    EDITED_HISTORY = "edited_history"  # an earlier message has changed
    TRUNCATED_HISTORY = "truncated_history"  # earlier messages are missing
    REORDERED_CONTEXT = "reordered_context"  # the same retrieved passages in another order
    OTHER = "other"


class Difference(Struct, gc=False):
    """First difference between a prompt and an earlier one of its conversation or template."""

    change: DifferenceKind
    message: int  # index among the template's messages, including a system prompt; -1: before them
    role: str  # the message's role; "other" if no engine knows it, "" before all messages
    path: str  # place in the request's body: `messages[3].content[1].text`, `tools[2].function.parameters`
    offset_bytes: int  # first byte that differs, in the prompt's canonical bytes
    at_bytes: int  # first byte that differs, within the UTF-8 text at `path`
    lost_bytes: int  # bytes after the difference that the earlier prompt had too, and that must be computed again
    shape: str = ""  # the differing text, digits as 0, letters as a and A, up to SHAPE_CHARS_MAX
    piece_hash: int = 0  # hash of the differing text: distinguishes two differences without their text
    before: str = ""  # the earlier prompt's text there; empty unless excerpts are enabled
    after: str = ""  # the new prompt's text there; empty unless excerpts are enabled
    # first byte of the date, identifier or number that changes, counted like `at_bytes`; -1: no such text
    token_bytes: int = -1


SHAPE_CHARS_MAX = 64
EXCERPT_CHARS_MAX = 160


class PromptAnalysis(Struct):
    """Result of comparing a prompt with the texts of earlier prompts, before it is placed. Bytes are canonical
    bytes."""

    known_bytes: int = 0  # leading bytes that an earlier prompt of the same identity had too
    repeated_bytes: int = 0  # bytes after `known_bytes` and a difference that an earlier prompt had too
    identity_bytes: int = 0  # leading bytes that a prompt of another identity had
    template: int = 0  # 64-bit name of the shared prefix that the prompt begins with; 0: unknown
    conversation: int = 0  # 64-bit name of the prompt's conversation
    turn: int = 0  # earlier prompts of that conversation
    appended: bool = True  # the prompt changes no earlier part of its conversation
    tools: bool = False  # the request has tools
    tool_calls: int = 0  # tool calls in the prompt's history
    step: str = ""  # an agent's step, as the request names it; "": none
    difference: Difference | None = None  # set if the prompt is not `appended`, or its template changed
    agent: str = ""  # kind of agent that the client runs; "" if unknown
    apart: bool = False  # the other identity has a salt or a cache of its own, and must not be disclosed to this client


class Template(Struct):
    """A prefix that several conversations share, as reported by the component with access to their texts."""

    id: int
    parent: int  # id of a shorter template that this one begins with; 0: none
    prompt_bytes: int  # canonical bytes that are shared
    key: int  # chain key of the last full block: its holders have the whole template; 0: shorter than a block
    tools: int = 0  # number of its tools
    messages: int = 0  # number of its complete messages
    label: str = ""  # the template's beginning, truncated; empty unless excerpts are enabled
    conversations: int = 0
    path: str = ""  # path of requests with the template
    body: bytes = b""  # shortest request with the whole template, to warm a replica; empty if too long to keep


class TokenBreakdown(Struct, gc=False):
    """A prompt's tokens: those found, on the GPU or outside it, and the reasons for the others. `misses` has only
    non-zero entries.

        hit + sum(misses) = prompt_tokens, always.
    """

    prompt_tokens: int
    hit: int
    misses: dict[MissReason, int]
    saved_ms: float = 0.0  # additional time to first token on the replica that has cached the spilled tokens
    loaded: int = 0  # part of `hit` that was not on the GPU, and came from memory or files
    dropped_elsewhere: int = 0  # part of the evicted tokens that other replicas computed last
    # replica that has more of the prompt, and the reason to pass it over (placement/spill.py)
    held: tuple[str, str] = ("", "")
    pulled: int = 0  # part of `hit` that came from another replica's memory

    def header(self, *, isolated: bool = False) -> str:
        """Return the value of `x-warmroute-miss`. It does not disclose to an `isolated` tenant that the prompt is
        cached for another identity: those tokens count as cold."""
        misses = self.misses
        if isolated and MissReason.IDENTITY in misses:
            unknown = (MissReason.IDENTITY, MissReason.NEW)
            left = {miss: tokens for miss, tokens in misses.items() if miss not in unknown}
            misses = {MissReason.COLD: sum([misses.get(miss, 0) for miss in unknown]), **left}
        reasons = tuple(misses)
        return (_forms.get(reasons) or _form(reasons)) % tuple(misses.values())


_forms: dict[tuple[MissReason, ...], str] = {}  # a dozen sets of reasons are nearly all that occur


def _form(reasons: tuple[MissReason, ...]) -> str:
    form = _forms[reasons] = ",".join([f"{reason}=%d" for reason in reasons])
    return form
