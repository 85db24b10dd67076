"""Repairs of a request's tools, so that equal tools make equal prompts: the tools, or the keys of their schemas, are
sorted.

Tools stand at the beginning of nearly every template, and are printed in the order of the request. A client that keeps
them in a set or a map sends the same tools in another order each time, and the engine computes the whole rest of the
prompt again.

Only the bytes of the `tools` value are replaced. They are located exactly: the body is walked from member to member, by
the lengths that the decoder returned, and every name and value must be at its expected place. Any irregularity ends the
walk, and the body is left unchanged: a name twice (engines take the last), a name with escapes, malformed JSON. Sorted
tools keep their own bytes. A schema is written anew, without white space, only if its keys are not in order. Strings,
numbers and arrays come out as the same values, so `required` and `enum` keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from msgspec import Raw

from router.core.dialects.tenant_isolation import CHAT, MESSAGES, RESPONSES
from router.core.prompts import sliced_json
from router.core.prompts.json_fields import UNREADABLE

SORT_TOOLS, CANONICAL_TOOLS = "sort_tools", "canonical_tools"
REPAIRS = (SORT_TOOLS, CANONICAL_TOOLS)
PATHS = frozenset((CHAT, MESSAGES, RESPONSES))  # paths with `tools` in their bodies

_TOOLS = b'"tools"'
_SCHEMAS = ("parameters", "input_schema")
_NAME = re.compile(rb'[ \t\r\n]*"([^"]*)"[ \t\r\n]*:[ \t\r\n]*')
_NEXT = re.compile(rb"[ \t\r\n]*([,}])")


class _Function(msgspec.Struct):
    name: str = ""


class _Tool(msgspec.Struct):
    type: str = ""
    name: str = ""
    function: _Function | None = None


_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_pieces = msgspec.json.Decoder(list[Raw]).decode
_decode_tool = msgspec.json.Decoder(_Tool).decode
_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


class ToolNormalizer:
    """Repairs bodies, and caches the results by tools, since the same tools come with every turn. For one thread."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: dict[tuple[str, tuple[str, ...], bytes], tuple[bytes, tuple[str, ...]]] = {}

    def normalize(self, body: bytes, wanted: tuple[str, ...], whose: str = "") -> tuple[bytes, tuple[str, ...]]:
        """Return the body, and those of `wanted` that it needed. If it needed none, the body is returned unchanged.
        Results cached for another `whose` are not found: the lookup time would reveal them."""
        place = _place(body) if _TOOLS in body else None
        if place is None:
            return body, ()
        start, end = place
        key = (whose, wanted, body[start:end])
        found = self._known.get(key)
        if found is None:
            found = _repair(key[2], wanted)
            self._remember(key, found)
        tools, done = found
        return (b"".join((body[:start], tools, body[end:])), done) if done else (body, ())

    def _remember(self, key: tuple[str, tuple[str, ...], bytes], found: tuple[bytes, tuple[str, ...]]) -> None:
        size = len(key[2]) + len(found[0]) + _ENTRY_BYTES
        if size > self._bytes_max // 4:
            return
        if self._bytes + size > self._bytes_max:
            self._known, self._bytes = {}, 0
        self._known[key] = found
        self._bytes += size


_ENTRY_BYTES = 400  # memory of an entry without its tools, by tracemalloc


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of these repairs in their fixed order, each once."""
    given = frozenset(names)
    return tuple([name for name in REPAIRS if name in given])


def _place(body: bytes) -> tuple[int, int] | None:
    """Return the start and the end of the value of `tools`. None if it is absent, or if any name of the body's top
    level comes twice: a decoded value follows its name only if no other value was taken for it."""
    try:
        members = sliced_json.read(_decode_members, body)
    except UNREADABLE:
        return None
    at, found, comma = body.index(b"{") + 1, None, b""
    for name, raw in members.items():
        behind, value = _NAME.match(body, at), bytes(raw)
        if behind is None or behind[1] != name.encode() or not body.startswith(value, behind.end()):
            return None
        at = behind.end() + len(value)
        if name == "tools":
            found = behind.end(), at
        following = _NEXT.match(body, at)
        if following is None:
            return None
        at, comma = following.end(), following[1]
    return found if comma == b"}" else None


def _repair(tools: bytes, wanted: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """Return the repaired tools, and the repairs of `wanted` that they needed. Tools that no engine takes are
    unchanged."""
    done: list[str] = []
    try:
        pieces = [bytes(piece) for piece in _decode_pieces(tools)]
        if CANONICAL_TOOLS in wanted:
            made = [_canonical(piece) for piece in pieces]
            if made != pieces:
                pieces = made
                done.append(CANONICAL_TOOLS)
        if SORT_TOOLS in wanted:
            ordered = sorted(pieces, key=_order)
            if ordered != pieces:
                pieces = ordered
                done.append(SORT_TOOLS)
    except UNREADABLE:
        return tools, ()
    return (b"[" + b",".join(pieces) + b"]", in_order(done)) if done else (tools, ())


def _order(piece: bytes) -> tuple[str, str]:
    """Return the sort key of a tool: its name. The engine's own tools, which have no name, come first, by type."""
    tool = _decode_tool(piece)
    return (tool.function.name if tool.function is not None else tool.name), tool.type


def _canonical(piece: bytes) -> bytes:
    """Return a tool, or the function in it, with the keys of its schema sorted at every depth. Unchanged if they are
    sorted."""
    fields = {name: bytes(raw) for name, raw in _decode_members(piece).items()}
    made = dict(fields)
    for name in _SCHEMAS:
        if name in fields:
            made[name] = _sorted_keys(fields[name])
    if fields.get("function", b"").startswith(b"{"):
        made["function"] = _canonical(fields["function"])
    if made == fields:
        return piece
    return b"{" + b",".join([_encode(name) + b":" + value for name, value in made.items()]) + b"}"


def _sorted_keys(schema: bytes) -> bytes:
    value = sliced_json.value(schema)
    made = _encode_sorted(value)
    return schema if _encode(value) == made else made
