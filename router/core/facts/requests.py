"""Requests as facts that nobody changes: prompts, where their messages end, what a body asks.

Facts (this file, replicas.py, placements.py, misses.py) have no behaviour beyond their own arithmetic. Those of which
each request makes some are msgspec Structs, made in less than half the time that a dataclass takes, which is a fraction
of a frozen one's. Where no cycle can arise they say `gc=False`: the collector, which runs the more often the more is
made, does not count them. Compiled they are C's (deploy/compiled_sources.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from msgspec import Struct


class Priority(IntEnum):
    """Whose turn it is when the fleet is full; by name in `x-warmroute-priority`."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


OPAQUE_BYTES = 1_024  # canonical bytes that stand for one part of a prompt which is no text, such as an image


@dataclass(slots=True, eq=False)
class Beginning:
    """Where a message of a prompt ended: prompts that begin alike up to there share one. Sizes are canonical bytes
    behind the prompt's head (tools and template arguments), of which two such prompts may have different ones.
    """

    size: int
    first_user_end: int  # 0 where no message was the user's
    spans: tuple[tuple[int, int], ...]  # (start, end) of the latest assistant messages
    opaque_bytes: int
    hint_bytes: int = 0  # offset behind the last breakpoint before the first user message's end; 0: none
    # What `chain_of` knows of it, by root and head: none of it is a fact of the prompt's.
    chains: dict[tuple[int, bytes], Any] = field(default_factory=dict, repr=False)
    said: Said | None = field(default=None, repr=False)  # the messages, where templates are rendered with them


class Said(Struct, eq=False):
    """Decoded messages from a conversation's first on. Many beginnings of a conversation share a list, and none
    changes what is in it."""

    messages: list[Any]
    count: int = 0  # leading messages of the list that belong to the beginning
    held_bytes: int = 0  # memory that these messages take, an upper bound

    def copy(self) -> Said:
        """The same messages in a list of their own, to which more can be added."""
        return Said(self.messages[: self.count], self.count, self.held_bytes)

    def add(self, message: object, held_bytes: int) -> None:
        """Put a message behind the others, which takes so many bytes of memory."""
        self.messages.append(message)
        self.count += 1
        self.held_bytes += held_bytes


# What stands before a prompt's messages: its canonical bytes; where the last breakpoint in them is; and `arguments` and
# `fewer_tools` (see Prompt).
Heading = tuple[bytes, int, tuple[int, int], tuple[int, bytes] | None]


@dataclass(slots=True, eq=False)
class Joint:
    """How a prompt hangs together with prompts read before."""

    head: bytes  # canonical bytes before the first message
    before: Beginning | None  # beginning behind which the prompt's `text` begins; None: `text` is all of it
    ends: list[Beginning]  # ends of messages in `text` that later prompts may ask for
    whole: Callable[[], Prompt | None]  # reads the whole prompt again, should the chain of `before` not be known


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
    skipped_bytes: int = 0  # bytes of the prompt before `text`
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


class AgentIds(Struct, gc=False):
    """Whose request it is by the client's own names: text that clients choose, which is neither kept nor shown."""

    client: str  # name of the table's row that found them (core/prompts/agents.py); "" for names of any client
    conversation: bytes
    parent: bytes = b""  # the conversation that started this one; empty for none
    session: bytes = b""  # name that all conversations of one session share
    final: bool = False  # the client says that the conversation is over


class Kin(Struct, gc=False):
    """The conversation of a request by what its client says, as 64-bit names that differ between tenants."""

    conversation: int
    parent: int = 0  # the conversation that started this one; 0: none
    final: bool = False  # the conversation is over: nothing of it will be asked for again


class Ask(Struct, eq=False):
    """A parsed request: only what placement needs to know of it."""

    model: str | None
    prompt: Prompt | None = None
    stream: bool = False
    salt: bytes = b""  # cache_salt and whatever else separates caches besides the model
    session: str | None = None  # prompt_cache_key; a session header comes from the proxy
    output_tokens_max: int | None = None
    stored: bool | None = None  # `store`; the Responses API keeps answers unless it is false
    response_id: str | None = None  # previous_response_id; only the replica that made the response can continue it
    wants_usage: bool = False  # the stream will report usage: the client asked, or the dialect always does
    metadata: bytes = b""  # the body's own, JSON; dropped once `step` is read
    step: str = ""  # an agent's step, as the request names it; "": none
    stream_options: dict[str, Any] | None = None  # the request's own; dropped once its body is what goes on
    names: dict[bytes, bytes] | None = None  # fields that say whose it is (prompts/agents.py); dropped once it is known
    adapter: str = ""  # LoRA adapter that the body names besides its model, as SGLang takes it (`lora_path`)
    new_bytes: int = 0  # bytes of the body that no earlier body began with; 0: nothing of it was known
    decoded: object = None  # the dialect's decoded body, for its `template_input`

    def __eq__(self, other: object) -> bool:
        """Whether they ask for the same, however they were read."""
        return isinstance(other, Ask) and _same(self, other, self.__struct_fields__[:-2])

    __hash__ = None  # type: ignore[assignment]

    @property
    def hint_bytes(self) -> int:
        """Where the client says that its template ends (`Prompt`); 0: nowhere."""
        return self.prompt.hint_bytes if self.prompt is not None else 0


def _same(one: object, other: object, fields: tuple[str, ...]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in fields)


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
    add_special_tokens: bool = False  # the tokenizer adds its own tokens, such as BOS
    api: str = "chat"  # "chat", "messages" or "responses": engines fit their messages differently
    thinking_off: bool = False  # Messages API: thinking is disabled; vLLM asks the template which effort that is
