"""The nouns of the cache observatory: why tokens of a prompt had to be computed, and where two prompts differ.

Every prompt token is a hit or has exactly one reason. Reasons are stretches of the prompt, from its beginning to its
end, so they add up by construction: hit + misses = prompt tokens.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Miss(StrEnum):
    """Why tokens were not found in a replica's cache; those that somebody can do something about come first."""

    DIVERGED = "diverged"  # an earlier prompt had these tokens too, behind something that differs now
    EVICTED = "evicted"  # a replica held these tokens, and dropped them
    SPILLED = "spilled"  # another replica holds these tokens, and computing them here was cheaper
    REPLICA_LOST = "replica_lost"  # the replica that held these tokens is gone, or was restarted
    IDENTITY = "identity"  # the same prompt is held for another model, adapter, salt or tenant
    MISPREDICTED = "mispredicted"  # the router predicted a hit, and the engine reported a miss
    UNSUPPORTED = "unsupported"  # the router cannot read this prompt
    COLD = "cold"  # no earlier prompt begins like this one
    NEW = "new"  # tokens behind a prefix that was seen before: unavoidable
    TAIL = "tail"  # a partial block, and the last token, which engines always compute


class TokenPlace(StrEnum):
    """Where a token of a prompt ends on its way from asked to hit, in the order of that way. Reasons say why a token
    was computed, for whoever can mend it; places also say where it was held meanwhile, and how a hit was had."""

    UNSUPPORTED = "unsupported"  # tokens of a prompt that the router cannot read
    NEVER_SEEN = "never_seen"  # no earlier prompt that began alike had these tokens
    TAIL = "tail"  # a partial block, and the last token, which engines always compute
    REWRITTEN = "rewritten"  # an earlier prompt had these tokens too, behind something that differs now
    IDENTITY = "identity"  # tokens held for another model, adapter, salt or tenant
    REPLICA_LOST = "replica_lost"  # the replica that held these tokens is gone, or was restarted
    EVICTED_HERE = "evicted_here"  # the replica that was asked dropped these tokens
    EVICTED_BY_OTHERS = "evicted_by_others"  # other replicas dropped these tokens
    HELD_ELSEWHERE = "held_elsewhere"  # another replica holds these tokens, and was passed over
    MISPREDICTED = "mispredicted"  # the replica was believed to hold these tokens, and its engine did not find them
    TIER = "tier"  # tokens that were found in memory or files behind the GPU, and loaded
    PULLED = "pulled"  # tokens that came from another replica's memory
    REPLAY = "replay"  # tokens of a prompt that was asked for before, found on the GPU
    GENUINE = "genuine"  # tokens of a new prompt, found on the GPU


STAGES = {
    "seen": (TokenPlace.UNSUPPORTED, TokenPlace.NEVER_SEEN, TokenPlace.TAIL),
    "unchanged": (TokenPlace.REWRITTEN, TokenPlace.IDENTITY),
    "kept": (TokenPlace.REPLICA_LOST, TokenPlace.EVICTED_HERE, TokenPlace.EVICTED_BY_OTHERS),
    "reached": (TokenPlace.HELD_ELSEWHERE,),
    "hit": (TokenPlace.MISPREDICTED,),
}
"""Stages of the way from asked to hit, each with the places of the tokens that do not reach it. Places of no stage
are those of hits."""

AVOIDABLE = (Miss.DIVERGED, Miss.EVICTED, Miss.SPILLED, Miss.REPLICA_LOST, Miss.IDENTITY, Miss.MISPREDICTED)


class Change(StrEnum):
    """What kind of difference makes a prompt diverge from an earlier one."""

    TIMESTAMP = "timestamp"  # a date or a time of day
    IDENTIFIER = "identifier"  # a UUID, a request id
    COUNTER = "counter"  # a number that goes up
    TOOL_ORDER = "tool_order"  # the same tools in another order
    TOOL_ADDED = "tool_added"
    TOOL_REMOVED = "tool_removed"
    KEY_ORDER = "key_order"  # the same JSON object, its keys in another order
    WHITESPACE = "whitespace"
    EDITED_HISTORY = "edited_history"  # an earlier message is not what it was
    TRUNCATED_HISTORY = "truncated_history"  # earlier messages are gone
    REORDERED_CONTEXT = "reordered_context"  # the same retrieved passages in another order
    OTHER = "other"


class Difference(Struct, array_like=True, gc=False):  # an array where workers send it to their hub
    """Where a prompt first differs from an earlier one of its conversation or template."""

    change: Change
    message: int  # index among the messages that the template sees, a system prompt included; -1: before them
    role: str  # the message's role; "other" if no engine knows it, "" before all messages
    path: str  # place in the request's body: `messages[3].content[1].text`, `tools[2].function.parameters`
    offset_bytes: int  # first byte that differs, in the prompt's canonical bytes
    at_bytes: int  # first byte that differs, within the UTF-8 text at `path`
    lost_bytes: int  # bytes behind the difference that the earlier prompt had too: computed again because of it
    shape: str = ""  # the text that differs, digits as 0, letters as a and A, up to SHAPE_CHARS_MAX
    piece_hash: int = 0  # hash of the text that differs: tells two differences apart without their text
    before: str = ""  # the earlier prompt's text there; empty unless excerpts are wanted
    after: str = ""  # the new prompt's text there; empty unless excerpts are wanted
    token_bytes: int = -1  # first byte of the date, identifier or number that changes, as `at_bytes`; -1: none does


SHAPE_CHARS_MAX = 64
EXCERPT_CHARS_MAX = 160


class Sighting(Struct, array_like=True):
    """What the texts of earlier prompts say of this one, before it is placed. Bytes are canonical bytes."""

    known_bytes: int = 0  # leading bytes that an earlier prompt of the same identity had too
    repeated_bytes: int = 0  # bytes behind `known_bytes` and a difference that an earlier prompt had too
    identity_bytes: int = 0  # leading bytes that a prompt of another identity had
    template: int = 0  # 64-bit name of the shared prefix that the prompt begins with; 0: none is known
    conversation: int = 0  # 64-bit name of the prompt's conversation
    turn: int = 0  # earlier prompts of that conversation
    appended: bool = True  # the prompt changes nothing that its conversation had said
    tools: bool = False  # the request brings tools
    tool_calls: int = 0  # tool calls in the prompt's history
    step: str = ""  # an agent's step, as the request names it; "": none
    difference: Difference | None = None  # set where the prompt is not `appended`, or its template changed
    agent: str = ""  # kind of agent whose client asks; "" where it is not known
    apart: bool = False  # the other identity has a salt, or a cache of its own: who asks may not hear of it


class Template(Struct):
    """A prefix that several conversations share, as whoever saw their texts tells of it."""

    id: int
    parent: int  # id of a shorter template that this one begins with; 0: none
    prompt_bytes: int  # canonical bytes that are shared
    key: int  # chain key of the last full block: its holders hold the whole template; 0: shorter than a block
    tools: int = 0  # number of its tools
    messages: int = 0  # number of its whole messages
    label: str = ""  # the template's beginning, cut short; empty unless excerpts are wanted
    conversations: int = 0
    path: str = ""  # path of requests that have the template
    body: bytes = b""  # shortest request that has the whole template, for warming a replica; empty if too long to keep


class Breakdown(Struct, array_like=True, gc=False):
    """A prompt's tokens: those that were found, on the GPU or behind it, and why the others were not. `misses` are
    those that are not nought.

    hit + sum(misses) = prompt_tokens, always.
    """

    prompt_tokens: int
    hit: int
    misses: dict[Miss, int]
    saved_ms: float = 0.0  # how much longer the first token would have taken where the spilled tokens are held
    loaded: int = 0  # part of `hit` that was not on the GPU, and came from memory or files behind it
    dropped_elsewhere: int = 0  # part of the evicted tokens that other replicas computed last
    held: tuple[str, str] = ("", "")  # replica that holds more of the prompt, and why not there (placement/spill.py)
    pulled: int = 0  # part of `hit` that came from another replica's memory

    def header(self, *, isolated: bool = False) -> str:
        """The value of `x-warmroute-miss`. An `isolated` tenant is not told that the prompt is held for another
        identity: those tokens count as cold."""
        misses = self.misses
        if isolated and Miss.IDENTITY in misses:
            unknown = (Miss.IDENTITY, Miss.NEW)
            left = {miss: tokens for miss, tokens in misses.items() if miss not in unknown}
            misses = {Miss.COLD: sum([misses.get(miss, 0) for miss in unknown]), **left}
        reasons = tuple(misses)
        return (_forms.get(reasons) or _form(reasons)) % tuple(misses.values())


_forms: dict[tuple[Miss, ...], str] = {}  # a dozen sets of reasons are nearly all that there are


def _form(reasons: tuple[Miss, ...]) -> str:
    form = _forms[reasons] = ",".join([f"{reason}=%d" for reason in reasons])
    return form
