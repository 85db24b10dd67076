"""The simulated tokenizer: one token is four bytes of UTF-8, and its id is those bytes as a little-endian
number.

So counting is a division, a prompt's token ids are its bytes, and a chain of block keys over tokens is a
chain over bytes. What matters to a cache is kept: a conversation's next turn renders to an extension of this
one, answer included, because a prompt ends with the very header that the answer's message will get, and text
continues right there. (When a prompt's length is no multiple of four, its last token is a short one; with the
answer's first bytes it becomes a whole one, which leaves all counts as they are. The ids that a stream tells are
those of the prompt and of the answer by themselves: as a prompt they go on with the same answer, and find in a cache
what they share with the first prompt.)"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

BYTES_PER_TOKEN = 4
TOKEN_IDS = 1 << 32
"""Ids are below this."""


class Message(msgspec.Struct):
    """A chat message, as far as a chat template would look at it."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Rendered text of one prompt and its answer: what a `BlockStored` event is made of."""

    data: bytes
    salt: str


def render_chat(
    messages: Iterable[Message], tools: Sequence[Any] | None, *, generate: bool = True, opened: bool = False
) -> bytes:
    """The prompt a chat becomes: tools first, then `<|role|>`, text and a newline for every message; `opened`: the last
    one has no newline, so that it goes on."""
    parts: list[str] = []
    if tools:
        parts += ["<|tools|>\n", msgspec.json.encode(tools).decode(), "\n"]
    for message in messages:
        parts += ["<|", message.role, "|>\n"]
        if isinstance(message.content, str):
            parts.append(message.content)
        elif message.content:
            parts += [_part_text(part) for part in message.content]
        if message.tool_calls:
            parts += ["<|tool_calls|>", msgspec.json.encode(message.tool_calls).decode()]
        parts.append("\n")
    if opened and parts:
        parts.pop()
    if generate:
        parts.append("<|assistant|>\n")
    return "".join(parts).encode("utf-8", "surrogatepass")


def _part_text(part: dict[str, Any]) -> str:
    text = part.get("text")
    # Images and the like cost a few tokens here, but tell two of them apart, as an engine's cache does.
    return text if isinstance(text, str) else f"<|{xxh3_64_intdigest(msgspec.json.encode(part)):016x}|>"


def count(data: bytes) -> int:
    """Tokens in rendered text."""
    return -(-len(data) // BYTES_PER_TOKEN)


def ids(data: bytes) -> list[int]:
    """Token ids of rendered text; a short last token counts as if zeros followed."""
    words = array("I", data + bytes(-len(data) % BYTES_PER_TOKEN))
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def from_ids(token_ids: Sequence[int]) -> bytes:
    """Rendered text of token ids: the inverse of `ids`. Raises ValueError for an id out of range."""
    try:
        words = array("I", token_ids)
    except OverflowError:
        raise ValueError(f"token ids are between 0 and {TOKEN_IDS - 1}") from None
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    return data[: 1 - BYTES_PER_TOKEN] + data[1 - BYTES_PER_TOKEN :].rstrip(b"\0")


def chain(data: bytes, block_tokens: int, salt: str = "") -> list[int]:
    """Keys of the full blocks of rendered text. A key is the xxh3-64 of its block seeded with the key before
    it, so it names the whole prefix; a cache salt separates everything."""
    size = block_tokens * BYTES_PER_TOKEN
    key = xxh3_64_intdigest(salt.encode()) if salt else 0
    keys: list[int] = []
    for start in range(0, len(data) - size + 1, size):
        key = xxh3_64_intdigest(data[start : start + size], key)
        keys.append(key)
    return keys


def answer(prompt: bytes, tokens: int) -> str:
    """What the model says, greedily: each token follows from all text before it, be that prompt or answer. Four
    printable ASCII bytes a token, none of which JSON escapes. Zeros, which fill short tokens, do not count."""
    text = xxh3_64(prompt.replace(b"\0", b""))
    said: list[str] = []
    for _ in range(tokens):
        token = text.hexdigest()[:BYTES_PER_TOKEN]
        said.append(token)
        text.update(token.encode())
    return "".join(said)
