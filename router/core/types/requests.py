"""Requests: prompts, ends of their messages, and the fields of a body that placement needs.

Types of this package (this file, replicas.py, placements.py, cache_misses.py) have no behaviour except simple
arithmetic on their own fields. Types with several instances for each request are msgspec Structs. Creating one takes
less than half the time of a dataclass, which itself takes a fraction of a frozen one's. Types that cannot form a cycle
have `gc=False`: the garbage collector, which runs more often the more objects are created, does not count them.
Compiled code uses C structs instead (deploy/compiled_sources.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from msgspec import Struct


class Priority(IntEnum):
    """Order of requests when the fleet is full; by name in `x-warmroute-priority`."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


OPAQUE_BYTES = 1_024  # canonical bytes that stand for one part of a prompt other than text, such as an image


@dataclass(slots=True, eq=False)
class MessagePrefix:
    """End of a message of a prompt. Prompts with the same beginning up to there share one.

    Sizes are canonical bytes after the prompt's head (tools and template arguments), in which two such prompts may
    differ.
    """

    size: int
    first_user_end: int  # 0 if no message is the user's
    spans: tuple[tuple[int, int], ...]  # (start, end) of the latest assistant messages
    opaque_bytes: int
    hint_bytes: int = 0  # offset after the last breakpoint before the first user message's end; 0: none
    # Cache of `chain_of`, by root and head; not a property of the prompt.
    chains: dict[tuple[int, bytes], Any] = field(default_factory=dict, repr=False)
    said: DecodedMessages | None = field(default=None, repr=False)  # the messages, if templates are rendered with them


class DecodedMessages(Struct, eq=False):
    """Decoded messages from the first one of a conversation. Many beginnings of a conversation share a list, and none
    changes its elements."""

    messages: list[Any]
    count: int = 0  # leading messages of the list that belong to the beginning
    held_bytes: int = 0  # memory that these messages take, an upper bound

    def copy(self) -> DecodedMessages:
        """Return the same messages in a separate list, to which more can be added."""
        return DecodedMessages(self.messages[: self.count], self.count, self.held_bytes)

    def add(self, message: object, held_bytes: int) -> None:
        """Append a message, which takes `held_bytes` of memory."""
        self.messages.append(message)
        self.count += 1
        self.held_bytes += held_bytes


# The part of a prompt before its messages: its canonical bytes; the offset of the last breakpoint in them; and
# `arguments` and `fewer_tools` (see Prompt).
Heading = tuple[bytes, int, tuple[int, int], tuple[int, bytes] | None]


@dataclass(slots=True, eq=False)
class MessageBoundary:
    """Connection of a prompt with prompts read before."""

    head: bytes  # canonical bytes before the first message
    before: MessagePrefix | None  # beginning after which the prompt's `text` begins; None: `text` is complete
    ends: list[MessagePrefix]  # ends of messages in `text` that later prompts may look up
    whole: Callable[[], Prompt | None]  # reads the whole prompt again, if the chain of `before` is unknown


class Prompt(Struct, eq=False):
    """The chat template's input, as canonical bytes.

    Turn n+1 of an append-only conversation starts with all bytes of turn n. Offsets count from the prompt's first byte.

    - `first_user_end`: offset after the first user message.
    - `assistant_spans`: (start, end) offsets of assistant messages, in order.
    - `opaque_bytes`: bytes that stand for other content, OPAQUE_BYTES for each part (an image's digest). They are
      excluded from the ratio of bytes to tokens.
    - `arguments`: (start, end) of the template's arguments, which the ring ignores.
    - `fewer_tools`: number of leading bytes that are tools, and their replacement on engines that omit tools that may
      not be called. None if all tools may be called.
    - `bytes_per_token`: set only if known, not learned: a prompt given as token ids.
    - `hint_bytes`: offset after the last `cache_control` breakpoint before the end of the first user message. A mark
      before it belongs to the client's template, a later one only to its conversation. 0: none.

    If the beginning of the prompt was read before (`joint`), `text` is only the rest after it, and `assistant_spans`
    has only the latest assistant messages.
    """

    text: bytes
    first_user_end: int
    assistant_spans: tuple[tuple[int, int], ...] = ()
    opaque_bytes: int = 0
    bytes_per_token: float | None = None
    skipped_bytes: int = 0  # bytes of the prompt before `text`
    arguments: tuple[int, int] = (0, 0)
    fewer_tools: tuple[int, bytes] | None = None
    hint_bytes: int = 0
    joint: MessageBoundary | None = None

    def __eq__(self, other: object) -> bool:
        """True if the prompts are the same, independent of `hint_bytes` and `joint`."""
        return isinstance(other, Prompt) and _same(self, other, self.__struct_fields__[:-2])

    __hash__ = None  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """Canonical bytes of the whole prompt."""
        return self.skipped_bytes + len(self.text)

    def release(self) -> None:
        """Drop the text, which is not needed after hashing; sizes stay."""
        self.skipped_bytes, self.text, self.joint = self.size, b"", None


class AgentIds(Struct, gc=False):
    """Conversation identity of a request by the client's own names. Clients choose this text freely, so it is neither
    kept nor shown."""

    client: str  # name of the table's row that found them (core/prompts/agent_headers.py); "" for names of any client
    conversation: bytes
    parent: bytes = b""  # the conversation that started this one; empty: none
    session: bytes = b""  # name that all conversations of one session share
    final: bool = False  # the client marks the conversation as finished


class ConversationRef(Struct, gc=False):
    """Conversation identity of a request, as 64-bit names that differ between tenants."""

    conversation: int
    parent: int = 0  # the conversation that started this one; 0: none
    final: bool = False  # the conversation has ended, and no further request of it is expected


class RequestSpec(Struct, eq=False):
    """A parsed request, with only the fields that placement needs."""

    model: str | None
    prompt: Prompt | None = None
    stream: bool = False
    salt: bytes = b""  # cache_salt and all other values that separate caches, except the model
    session: str | None = None  # prompt_cache_key; a session header comes from the proxy
    output_tokens_max: int | None = None
    stored: bool | None = None  # `store`; the Responses API keeps answers unless it is false
    response_id: str | None = None  # previous_response_id; only the replica that made the response can continue it
    wants_usage: bool = False  # the stream will report usage: the client requested it, or the dialect always does
    metadata: bytes = b""  # the body's own, JSON; dropped once `step` is read
    step: str = ""  # an agent's step, as the request names it; "": none
    stream_options: dict[str, Any] | None = None  # the request's own; dropped once the body to forward is made
    # fields with the conversation identity (prompts/agent_headers.py); dropped once it is known
    names: dict[bytes, bytes] | None = None
    adapter: str = ""  # LoRA adapter that the body names in addition to its model, in SGLang's field `lora_path`
    new_bytes: int = 0  # bytes of the body that no earlier body began with; 0: no part of it was known
    decoded: object = None  # the dialect's decoded body, for its `template_input`

    def __eq__(self, other: object) -> bool:
        """True if the requests are the same, independent of `new_bytes` and `decoded`, which depend on earlier
        bodies."""
        return isinstance(other, RequestSpec) and _same(self, other, self.__struct_fields__[:-2])

    __hash__ = None  # type: ignore[assignment]

    @property
    def hint_bytes(self) -> int:
        """Offset at which the client marks the end of its template (`Prompt`); 0: unmarked."""
        return self.prompt.hint_bytes if self.prompt is not None else 0


def _same(one: object, other: object, fields: tuple[str, ...]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in fields)


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """Input from which an engine makes a prompt's token ids. Exactly one of `ids`, `text` and `messages` is set.

    `messages` are OpenAI chat messages for requests of any API, before the engine adapts them to its template.
    `content` is absent, None, a string or a list of text parts. The arguments of tool calls are JSON text, or its
    decoded value. `tools` are those of the request, wrapped as in OpenAI's chat API.
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
    add_special_tokens: bool = False  # the tokenizer adds its own tokens, such as BOS
    api: str = "chat"  # "chat", "messages" or "responses": engines adapt their messages differently
    # Messages API: thinking is disabled; vLLM queries the template for the corresponding effort
    thinking_off: bool = False
