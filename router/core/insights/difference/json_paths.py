"""Paths in the request's body for places in canonical bytes.

The dialects make one chat of every API's request (core/prompts/canonical.py). This module walks the same way back for
one message: it finds the message, block or item that it was made of, and the order of their texts in its content.
Without a body, or if the body does not fit, a place is named as in OpenAI's chat completions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from router.core.dialects import dialect_of
from router.core.insights.difference.json_changes import Steps, decode_json, text_of
from router.core.insights.difference.text_overlap import PIECES_MAX
from router.core.prompts.canonical import BILLING_HEADER, OPAQUE_REPEATS

PATH_CHARS_MAX = 200
_OPAQUE_BYTES = 16 * OPAQUE_REPEATS
_PLAIN = re.compile(r"[A-Za-z_$][\w$-]*")
# a string without an end extends to the end of the text
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.?)*+"?|\S', re.DOTALL)


class MessageSource(Struct):
    """Origin of one canonical message."""

    element: str
    texts: list[tuple[str, int, int]] = []  # path, bytes in the content, bytes of the body's text left out before them
    joint_bytes: int = 1  # bytes between two texts
    calls: list[tuple[str, str, bool]] = []  # path of each, path of its arguments within, True if its fields are flat
    fields: dict[str, str] = {}  # paths of other fields


def join_path(base: str, steps: Steps) -> str:
    """Return the path of a value that is some steps below another."""
    for step in steps:
        if isinstance(step, int):
            base += f"[{step}]"
        elif _PLAIN.fullmatch(step):
            base += f".{step}" if base else step
        else:
            base += f"[{text_of(step).decode(errors='replace')!r}]"
    return base if len(base) <= PATH_CHARS_MAX else base[: PATH_CHARS_MAX - 3] + "..."


class JsonPaths:
    """Names places of one request."""

    def __init__(self, path: str, body: bytes) -> None:
        self._path = path
        self._dialect = dialect_of(path).name if path else "openai"
        self._given = body
        self._read: Any = None

    @property
    def _body(self) -> dict[str, Any]:
        if self._read is None:
            read = decode_json(self._given)
            self._read = read if isinstance(read, dict) else {}
        found: dict[str, Any] = self._read
        return found

    def head(self, name: str, steps: Steps) -> str:
        """Return the path of a field before the messages, or of a value below it."""
        if name == "tools" and steps and isinstance(steps[0], int):
            return self._tool(steps[0], steps[1:])
        if name == "reasoning_effort" and self._dialect != "openai":
            name = "output_config.effort" if self._dialect == "anthropic" else "reasoning.effort"
        return join_path(name, steps)

    def _tool(self, index: int, steps: Steps) -> str:
        if self._dialect == "responses":
            flat = steps[1:] if steps[:1] == ("function",) else steps
            return join_path(_find_tool_path(self._body.get("tools"), index), flat)
        if self._dialect == "anthropic" and steps[:1] == ("function",):
            steps = steps[1:]
            steps = ("input_schema", *steps[1:]) if steps[:1] == ("parameters",) else steps
        return join_path("tools", (index, *steps))

    def plain(self, at: int) -> tuple[str, int]:
        """Return the path of the text with byte `at` of a prompt that is not a chat, and the offset in that text."""
        if self._dialect == "sglang":
            return "text", at
        name = "input" if self._path.endswith("/embeddings") else "prompt"
        given = self._body.get(name)
        for index, text in enumerate(given if isinstance(given, list) else ()):
            size = len(text_of(text)) if isinstance(text, str) else 0
            if at <= size:
                return f"{name}[{index}]", at
            at -= size + 1
        return name, at

    def message(self, index: int) -> str:
        """Return the path of a whole message."""
        return self._find_source(index).element

    def content(self, index: int, at: int) -> tuple[str, int]:
        """Return the path of the text with byte `at` of a message's content, and the offset in that text."""
        made = self._find_source(index)
        for n, (path, size, left_out) in enumerate(made.texts):
            if at < size or (at == size and (n + 1 == len(made.texts) or made.joint_bytes)):
                return path, at + left_out
            at -= size + made.joint_bytes
        return (made.texts[-1][0] if made.texts else f"{made.element}.content"), max(at, 0)

    def field(self, index: int, name: str, steps: Steps, at: int, canonical_at: int) -> tuple[str, int]:
        """Return the path of the text with byte `at` below another field of a message, and the offset in that text.
        `canonical_at` is the byte in a call's arguments as canonical JSON."""
        made = self._find_source(index)
        if name != "tool_calls":
            return join_path(made.fields.get(name, f"{made.element}.{name}"), steps), at
        call = steps[0] if steps else None
        if not isinstance(call, int) or call >= len(made.calls):
            return join_path(f"{made.element}.tool_calls", steps), at
        path, arguments, flat = made.calls[call]
        if steps[1:3] == ("function", "arguments"):
            given = self._value(f"{path}.{arguments}")
            if isinstance(given, str):
                return f"{path}.{arguments}", _in_text(given, canonical_at)
            return join_path(f"{path}.{arguments}", steps[3:]), at
        rest = steps[2:] if flat and steps[1:2] == ("function",) else steps[1:]
        return join_path(path, rest), at

    def _value(self, path: str) -> Any:  # noqa: ANN401  # JSON of any kind
        value: Any = self._body
        for name, number in re.findall(r"([A-Za-z_]+)|\[(\d+)\]", path):
            try:
                value = value[name] if name else value[int(number)]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def _find_source(self, index: int) -> MessageSource:
        walk = {"anthropic": _walk_anthropic, "responses": _walk_responses}.get(self._dialect, _walk_openai)
        try:
            for n, made in enumerate(walk(self._body)):
                if n == index:
                    return made
                if n >= PIECES_MAX:
                    break
        except (AttributeError, KeyError, TypeError, ValueError):
            pass  # a body that the dialect would not have read
        return MessageSource(f"messages[{index}]")


def _in_text(given: str, canonical_at: int) -> int:
    """Return the byte of a JSON text that is byte `canonical_at` of the same JSON without white space."""
    read = 0
    for n, token in enumerate(_JSON_TOKEN.finditer(given)):
        text = token.group()
        size = len(text.encode(errors="replace"))
        canonical = size
        if len(text) > 1 and ("\\" in text or not text.isascii()):
            canonical = len(text_of([decode_json(text.encode(errors="replace"))])) - 2
        if read + canonical > canonical_at or n >= PIECES_MAX:
            within = min(canonical_at - read, size)
            return len(given[: token.start()].encode(errors="replace")) + within
        read += canonical
    return len(given.encode(errors="replace"))


def _find_tool_path(tools: object, index: int) -> str:
    """Return the path of the tool of a Responses request that has this index among the tools shown to a model."""
    for n, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        inner = tool.get("tools") if kind == "namespace" else None
        shown = len(inner) if isinstance(inner, list) else int(kind in ("function", "custom"))
        if index < shown:
            return f"tools[{n}].tools[{index}]" if kind == "namespace" else f"tools[{n}]"
        index -= shown
    return f"tools[{len(tools) + index if isinstance(tools, list) else index}]"


def _text(path: str, text: str, *, system: bool = False) -> tuple[str, int, int]:
    left_out = 0
    if system and text.startswith(BILLING_HEADER):
        left_out = len(text_of(text)) - len(text_of(text.partition("\n")[2]))
    return path, len(text_of(text)) - left_out, left_out


def _texts(path: str, content: object, *, system: bool = False) -> list[tuple[str, int, int]]:
    """Return the texts of a content. The length of a part that is not text is that of its canonical bytes."""
    if isinstance(content, str):
        return [_text(path, content, system=system)]
    made = []
    for n, part in enumerate(content if isinstance(content, list) else ()):
        text = part if isinstance(part, str) else part.get("text")
        if isinstance(text, str):
            name = f"{path}[{n}]" if isinstance(part, str) else f"{path}[{n}].text"
            made.append(_text(name, text, system=system))
        else:
            made.append((f"{path}[{n}]", _OPAQUE_BYTES, 0))
    return [part for part in made if part[1]] if system else made


def _walk_openai(body: dict[str, Any]) -> Iterator[MessageSource]:
    for n, message in enumerate(body["messages"]):
        base = f"messages[{n}]"
        calls = message.get("tool_calls")
        made = [(f"{base}.tool_calls[{k}]", "function.arguments", False) for k in range(len(calls or ()))]
        texts = _texts(f"{base}.content", message.get("content"), system=message.get("role") == "system")
        yield MessageSource(base, texts, calls=made)


def _walk_anthropic(body: dict[str, Any]) -> Iterator[MessageSource]:
    system = body.get("system")
    blocks = [part for part in _texts("system", system) if part[1]]
    if isinstance(system, list):
        kept = [not str(block.get("text") or "").startswith(BILLING_HEADER) for block in system if block.get("text")]
        blocks = [part for part, keep in zip(blocks, kept, strict=False) if keep]
    if blocks:
        yield MessageSource("system", blocks, joint_bytes=0)
    for n, message in enumerate(body["messages"]):
        base, content = f"messages[{n}]", message["content"]
        if isinstance(content, str):
            yield MessageSource(base, [_text(f"{base}.content", content)])
        else:
            yield from _walk_blocks(f"{base}", message["role"], content)


def _walk_blocks(base: str, role: str, blocks: list[dict[str, Any]]) -> Iterator[MessageSource]:
    """Yield one message, after the tool results in it."""
    own = MessageSource(base, [], calls=[], fields={})
    for n, block in enumerate(blocks):
        path, kind = f"{base}.content[{n}]", block["type"]
        if kind == "tool_result" and role == "user":
            yield from _walk_result(path, block)
        elif kind == "tool_use":
            own.calls.append((path, "input", True))
        elif kind == "thinking":
            own.fields.setdefault("reasoning", f"{path}.thinking")
        elif kind == "text" and block.get("text"):
            own.texts.append(_text(f"{path}.text", block["text"]))
        elif kind == "image":
            own.texts.append((path, _OPAQUE_BYTES, 0))
    if role != "user" or own.texts:
        own.joint_bytes = int(role != "system")
        yield own


def _walk_result(path: str, block: dict[str, Any]) -> Iterator[MessageSource]:
    content = block.get("content") or ""
    parts = content if isinstance(content, list) else []
    texts = _texts(f"{path}.content", content)
    if parts:
        texts = [text for text, part in zip(texts, parts, strict=False) if part.get("type") == "text"]
    yield MessageSource(path, texts)
    if any(part.get("type") == "image" for part in parts):
        yield MessageSource(path, [(f"{path}.content", _OPAQUE_BYTES, 0)])


def _walk_responses(body: dict[str, Any]) -> Iterator[MessageSource]:
    if isinstance(instructions := body.get("instructions"), str) and instructions:
        yield MessageSource("instructions", [_text("instructions", instructions)])
    given = body["input"]
    if isinstance(given, str):
        yield MessageSource("input", [_text("input", given)])
        return
    open_: MessageSource | None = None
    for n, item in enumerate(given):
        path, kind = f"input[{n}]", item.get("type", "message")
        if item.get("role") == "assistant" or kind in ("function_call", "custom_tool_call", "reasoning"):
            if open_ is not None and _has_item_kind(open_, kind):
                yield open_
                open_ = None
            open_ = open_ or MessageSource(path, [], calls=[], fields={})
            _add_item(open_, path, kind, item)
            continue
        if open_ is not None:
            yield open_
            open_ = None
        if kind in ("function_call_output", "custom_tool_call_output"):
            yield MessageSource(path, _texts(f"{path}.output", item.get("output")))
        else:
            yield MessageSource(path, _texts(f"{path}.content", item.get("content")))
    if open_ is not None:
        yield open_


def _has_item_kind(made: MessageSource, kind: str) -> bool:
    """True if an assistant's message has an item of this kind already, so that the item begins another message."""
    if kind in ("function_call", "custom_tool_call"):
        return False
    return "reasoning" in made.fields if kind == "reasoning" else bool(made.texts)


def _add_item(made: MessageSource, path: str, kind: str, item: dict[str, Any]) -> None:
    if kind in ("function_call", "custom_tool_call"):
        made.calls.append((path, "arguments" if kind == "function_call" else "input", True))
    elif kind == "reasoning":
        content = "content" if item.get("content") else "summary"
        inner = "" if isinstance(item.get(content), str) else "[0].text"
        made.fields["reasoning"] = f"{path}.{content}{inner}"
    else:
        made.texts += _texts(f"{path}.content", item.get("content"))[:1] or [(f"{path}.content", 0, 0)]
