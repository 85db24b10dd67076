"""The nouns of the cache observatory: why tokens of a prompt had to be computed, and where two prompts differ.

Every prompt token is a hit or has exactly one reason. Reasons are stretches of the prompt, from its beginning to its
end, so they add up by construction: hit + misses = prompt tokens.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Miss(StrEnum):
    """Why tokens were not found in a replica's cache; those that somebody can do something about come first."""

    DIVERGED = "diverged"  # an earlier prompt had them too, behind something that differs now
    EVICTED = "evicted"  # a replica held them, and dropped them
    SPILLED = "spilled"  # another replica holds them, and it was cheaper to come here
    REPLICA_LOST = "replica_lost"  # whoever held them is gone, or was restarted
    IDENTITY = "identity"  # the same prompt is held for another model, adapter, salt or tenant
    MISPREDICTED = "mispredicted"  # we said held, the engine said no
    UNSUPPORTED = "unsupported"  # the router cannot read this prompt
    COLD = "cold"  # nothing like it was seen before
    NEW = "new"  # tokens behind a prefix that was seen before: unavoidable
    TAIL = "tail"  # a partial block, and the last token, which engines always compute


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
    at_bytes: int  # the same, within the text at `path` (UTF-8)
    lost_bytes: int  # bytes behind it that the earlier prompt had too: computed again for no other reason
    shape: str = ""  # what differs, digits as 0, letters as a and A, up to SHAPE_CHARS_MAX
    piece_hash: int = 0  # hash of what differs, so that two differences can be told apart without their text
    before: str = ""  # what stood there; empty unless excerpts are wanted
    after: str = ""  # what stands there now; likewise


SHAPE_CHARS_MAX = 64
EXCERPT_CHARS_MAX = 160


class Sighting(Struct, array_like=True):
    """What the texts of earlier prompts say of this one, before it is placed. Bytes are canonical bytes."""

    known_bytes: int = 0  # leading bytes that an earlier prompt of the same identity had too
    repeated_bytes: int = 0  # bytes behind these and behind a difference that an earlier prompt had too
    identity_bytes: int = 0  # leading bytes that a prompt of another identity had
    template: int = 0  # 64-bit name of the shared prefix that it begins with; 0: none is known
    conversation: int = 0  # 64-bit name of its conversation
    turn: int = 0  # earlier prompts of that conversation
    appended: bool = True  # nothing of what its conversation had said was changed
    tools: bool = False  # whether it brings tools
    tool_calls: int = 0  # tool calls in its history
    step: str = ""  # step of an agent that it says it is; "": none
    difference: Difference | None = None  # found where it is not `appended`, or its template changed
    apart: bool = False  # the other identity has a salt, or a cache of its own: who asks may not hear of it


class Template(Struct):
    """A prefix that several conversations share, as whoever saw their texts tells of it."""

    id: int
    parent: int  # a shorter one that it begins with; 0: none
    prompt_bytes: int  # canonical bytes that are shared
    key: int  # chain key of its last full block: who holds that holds all of it; 0: shorter than a block
    tools: int = 0  # how many it has
    messages: int = 0  # how many whole ones it has
    label: str = ""  # the template's beginning, cut short; empty unless excerpts are wanted
    conversations: int = 0
    path: str = ""  # path of requests that have the template
    body: bytes = b""  # the shortest request that has all of it, for warming a replica; empty if too long to keep


class Breakdown(Struct, array_like=True, gc=False):
    """A prompt's tokens: those that were found, and why the others were not. `misses` are those that are not nought.

    hit + sum(misses) = prompt_tokens, always.
    """

    prompt_tokens: int
    hit: int
    misses: dict[Miss, int]
    saved_ms: float = 0.0  # how much longer the first token would have taken where the spilled tokens are held

    def header(self, *, isolated: bool = False) -> str:
        """As `x-warmroute-miss` has it. To an `isolated` tenant what others asked for does not exist, nor what one did
        to others."""
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
