"""Simulated tokenizer: one token is four bytes of UTF-8, and its id is those bytes as a little-endian number.

So counting is a division, a prompt's token ids are its bytes, and a chain of block keys over tokens is a chain over
bytes. The property that matters to a cache is preserved. The next turn of a conversation renders to an extension of
this turn, including the answer. That is because a prompt ends with the header of the answer's message, and the text
continues right after it.

If a prompt's length is no multiple of four, its last token is short. With the first bytes of the answer it becomes a
full token, which does not change any count. The ids in a stream are those of the prompt and of the answer separately.
Used as a prompt, they lead to the same continuation, and match the cached part that they share with the first prompt.
"""

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
    """A chat message, limited to the fields that a chat template uses."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Rendered text of one prompt and its answer: the source of a `BlockStored` event."""

    data: bytes
    salt: str


def render_chat(
    messages: Iterable[Message], tools: Sequence[Any] | None, *, generate: bool = True, opened: bool = False
) -> bytes:
    """Return the prompt of a chat: tools first, then `<|role|>`, text and a newline for every message.

    `opened`: the last message has no newline, so that it is continued.
    """
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
            parts += ["<|tool_calls|>", msgspec.json.encode(list(map(_rendered_call, message.tool_calls))).decode()]
        parts.append("\n")
    if opened and parts:
        parts.pop()
    if generate:
        parts.append("<|assistant|>\n")
    return "".join(parts).encode("utf-8", "surrogatepass")


def _rendered_call(call: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return the parts of a tool call that chat templates render. vLLM passes arguments to them as an object, however
    the request has them. A call that vLLM would refuse stays as it is."""
    try:
        function = call["function"]
        return {"name": function["name"], "arguments": msgspec.json.decode(function["arguments"])}
    except (KeyError, TypeError, msgspec.DecodeError):
        return call


def _part_text(part: dict[str, Any]) -> str:
    text = part.get("text")
    # Images and similar parts cost a few tokens here, but two different ones have different tokens, as in an engine's
    # cache.
    return text if isinstance(text, str) else f"<|{xxh3_64_intdigest(msgspec.json.encode(part)):016x}|>"


def count(data: bytes) -> int:
    """Return the number of tokens in rendered text."""
    return -(-len(data) // BYTES_PER_TOKEN)


def ids(data: bytes) -> list[int]:
    """Return the token ids of rendered text; a short last token is padded with zeros."""
    words = array("I", data + bytes(-len(data) % BYTES_PER_TOKEN))
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def from_ids(token_ids: Sequence[int]) -> bytes:
    """Return the rendered text of token ids: the inverse of `ids`. Raises ValueError for an id out of range."""
    try:
        words = array("I", token_ids)
    except OverflowError:
        raise ValueError(f"token ids are between 0 and {TOKEN_IDS - 1}") from None
    if sys.byteorder == "big":
        words.byteswap()
    data = words.tobytes()
    return data[: 1 - BYTES_PER_TOKEN] + data[1 - BYTES_PER_TOKEN :].rstrip(b"\0")


def chain(data: bytes, block_tokens: int, salt: str = "") -> list[int]:
    """Return the keys of the full blocks of rendered text.

    A key is the xxh3-64 of its block seeded with the key before it, so it identifies the whole prefix. Keys with
    different cache salts never match.
    """
    size = block_tokens * BYTES_PER_TOKEN
    key = xxh3_64_intdigest(salt.encode()) if salt else 0
    keys: list[int] = []
    for start in range(0, len(data) - size + 1, size):
        key = xxh3_64_intdigest(data[start : start + size], key)
        keys.append(key)
    return keys


def answer(prompt: bytes, tokens: int) -> str:
    """Return the model's greedy answer: each token depends on all text before it, prompt or answer.

    A token is four printable ASCII bytes, none of which JSON escapes. Zeros, which pad short tokens, do not count.
    """
    text = xxh3_64(prompt.replace(b"\0", b""))
    said: list[str] = []
    for _ in range(tokens):
        token = text.hexdigest()[:BYTES_PER_TOKEN]
        said.append(token)
        text.update(token.encode())
    return "".join(said)
