"""First place at which two prompts differ: its tool or message, and the change in it.

Only the piece with the first different byte is analysed. Changes of whole messages and tools are considered first: some
removed, some in another order. Only then are the two texts compared (text_change_kind.py).
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from router.core.insights.difference.json_changes import (
    Changed,
    Steps,
    change_of,
    decode_json,
    items_of,
    text_of,
    tools_change,
)
from router.core.insights.difference.json_paths import JsonPaths
from router.core.insights.difference.text_change_kind import find_insertion, find_text_change, in_other_order
from router.core.insights.difference.text_overlap import common_prefix, common_suffix, cut
from router.core.insights.difference.volatile_values import Span, word
from router.core.prompts.canonical import GS, RS
from router.core.prompts.canonical_openai import FIELDS, HEAD
from router.core.types.cache_misses import DifferenceKind

LEADS_MAX = 64  # separators tried for the beginning of a message before the search is given up: texts may contain some
FIELDS_MAX = 64  # fields read of one message

_LEAD = re.compile(rb"\x1e([^\x1d-\x1f]{0,64})\x1f")
# Known names only: texts may forge others.
_FIELD = re.compile(rb"\x1d(%b)\x1f" % "|".join(("tools", *HEAD, *FIELDS)).encode())
_LISTS = ("tools", "functions")
_Fields = list[tuple[str, bytes]]


class Found(Struct):
    """A difference without a path yet. `before` and `after` are the texts of the value that changed."""

    change: DifferenceKind | None  # None: words, if no other kind is recognised
    before: bytes
    after: bytes
    at: int
    spans: tuple[Span, Span]
    message: int = -1
    role: str = ""
    path: str = ""
    at_bytes: int = 0
    cut: int = 0  # bytes of the first pieces before the difference
    olds: list[bytes] = []  # pieces of the earlier prompt, from the one that differs on
    news: list[bytes] = []
    placed: bool = True  # the first pieces are one piece that changed
    items: tuple[int, ...] = ()  # number of the pieces that are tools, if some were added or removed


def find(before: bytes, after: bytes, same: int, places: JsonPaths) -> Found:
    """Return the change at byte `same`, the first at which the prompts differ."""
    start = _message_start(before, after, same)
    if start is not None:
        return _in_message(before, after, same, start, places)
    if before[:1] in (GS, RS) or after[:1] in (GS, RS):
        return _in_head(before, after, same, places)
    return _in_text(before, after, same, places)


def _message_start(before: bytes, after: bytes, same: int) -> int | None:
    """Return the first byte of the message that contains byte `same`. None if that byte is in no message."""
    start = same
    for _ in range(LEADS_MAX):
        start = after.rfind(RS, 0, start)
        if start < 0:
            return None
        if _LEAD.match(before, start) and _LEAD.match(after, start):
            return start
    return None


def _messages(before: bytes, start: int, after: bytes, other: int) -> tuple[list[bytes], list[bytes]]:
    """Return the messages of both prompts from a byte on. The messages that both end with are one piece."""
    tail = common_suffix(before, after, max(start, other))
    lead = _LEAD.search(after, len(after) - tail)
    shared = len(after) - lead.start() if lead else 0
    sides = []
    for text, first in ((before, start), (after, other)):
        end = len(text) - shared
        made = cut(text[:end], (found.start() for found in _LEAD.finditer(text, first, end)))
        sides.append([*made, text[end:]] if shared else made)
    return sides[0], sides[1]


class _Message(NamedTuple):
    role: str
    lead_bytes: int
    content: bytes
    fields: _Fields


def _read(message: bytes) -> _Message:
    lead = _LEAD.match(message)
    role, start = (lead[1].decode(errors="replace"), lead.end()) if lead else ("", 0)
    fields, end = _fields(message, start)
    return _Message(role, start, message[start:end], fields)


def _fields(text: bytes, start: int = 0) -> tuple[_Fields, int]:
    """Return the fields that follow a content, and the end of the content."""
    found = [*islice(_FIELD.finditer(text, start), FIELDS_MAX)]
    ends = [*[each.start() for each in found[1:]], len(text)]
    fields = [
        (each[1].decode(errors="replace"), text[each.end() : end]) for each, end in zip(found, ends, strict=False)
    ]
    return fields, found[0].start() if found else len(text)


def _in_message(before: bytes, after: bytes, same: int, start: int, places: JsonPaths) -> Found:
    olds, news = _messages(before, start, after, start)
    index = sum(1 for _ in _LEAD.finditer(after, 0, start))
    one, other = _read(olds[0]), _read(news[0])
    told, placed = _find_message_change(olds, news)
    if one.role != other.role:
        found = _locate_change(Changed((), one.content, other.content, told or DifferenceKind.EDITED_HISTORY), 0)
        found.path, found.placed = places.message(index), False
    else:
        found = _in_one(one, other, index, places, told if not placed else None)
        found.placed = placed or found.change not in (told, None)
        if found.change is None:
            heading = other.role in ("system", "developer") and b"\x1euser\x1f" not in after[:start]
            if not heading:
                found.change = told or DifferenceKind.EDITED_HISTORY
            else:
                _look_put_in(found)
    found.message, found.role = index, other.role
    found.cut, found.olds, found.news = same - start, olds, news
    return found


def _in_one(one: _Message, other: _Message, index: int, places: JsonPaths, told: DifferenceKind | None) -> Found:
    """Return the difference of two messages in one place. `told` is the change if they are known to be different
    ones."""
    if one.content != other.content:
        found = _locate_change(Changed((), one.content, other.content, told))
        found.path, found.at_bytes = places.content(index, found.at)
        return found
    pairs = zip([*one.fields, ("", b"")], [*other.fields, ("", b"")], strict=False)
    (name, old), (named, new) = next(pair for pair in pairs if pair[0] != pair[1])
    if name != named:  # a field was added or removed
        found = _locate_change(Changed((), old, new, told), 0)
        field = named if named and named not in [each for each, _ in one.fields] else name or named
        found.path = places.field(index, field, (), 0, 0)[0]
        return found
    changed = change_of(old, new)
    found = _locate_change(changed if told is None else changed._replace(change=told))
    arguments = common_prefix(_arguments(old, changed.steps), _arguments(new, changed.steps))
    found.path, found.at_bytes = places.field(index, name, changed.steps, found.at, arguments)
    return found


def _arguments(calls: bytes, steps: Steps) -> bytes:
    """Return the arguments of the call that the steps lead to, as canonical JSON."""
    if steps[1:3] != ("function", "arguments"):
        return b""
    return text_of(decode_json(calls)[steps[0]]["function"]["arguments"])


def _find_message_change(olds: list[bytes], news: list[bytes]) -> tuple[DifferenceKind | None, bool]:
    """Return the change of whole messages, and True if the first ones may be one that changed."""
    times = Counter(olds)
    places = {message: n for n, message in enumerate(olds) if times[message] == 1}
    for n, message in enumerate(news):
        if n < len(olds) and olds[n] == message:
            return None, True  # one message in place of another
        place = places.get(message)
        if place is None:
            continue
        if n == 0:
            return _find_move_change(olds, news, place), False
        if place == n:
            return None, True
        return (DifferenceKind.TRUNCATED_HISTORY if place > n else DifferenceKind.EDITED_HISTORY), True
    return None, True


def _find_move_change(olds: list[bytes], news: list[bytes], place: int) -> DifferenceKind:
    """Return the change if the first new message was at `place` in the earlier prompt."""
    gone = olds[0]
    if news.count(gone) < olds.count(gone):
        return DifferenceKind.TRUNCATED_HISTORY
    end = max(place, news.index(gone)) + 1
    return (
        DifferenceKind.REORDERED_CONTEXT
        if Counter(olds[:end]) == Counter(news[:end])
        else DifferenceKind.EDITED_HISTORY
    )


def _in_head(before: bytes, after: bytes, same: int, places: JsonPaths) -> Found:
    """Return the difference before the messages: in the tools, or in arguments of the template."""
    one, other = [lead.start() if (lead := _LEAD.search(text)) else len(text) for text in (before, after)]
    fields = _fields(before[:one])[0], _fields(after[:other])[0]
    name, old, new = _first_field(*fields)
    if not name:  # not a field that a dialect writes
        return _in_text(before, after, same, places)
    olds, news = [items_of(value) if value else [] for value in (old, new)]
    index = next((n for n, (a, b) in enumerate(zip(olds, news, strict=False)) if a != b), min(len(olds), len(news)))
    changed = _find_field_change(name, old, new, olds, news, index)
    told = changed.change in (DifferenceKind.TOOL_ADDED, DifferenceKind.TOOL_REMOVED)
    found = _locate_change(changed, 0 if told or changed.change is DifferenceKind.TOOL_ORDER else None)
    _look_put_in(found)
    found.items = (len(olds[index:]), len(news[index:])) if told else ()
    found.path, found.at_bytes = places.head(name, changed.steps), found.at
    found.placed = index < min(len(olds), len(news)) and not told
    found.cut = common_prefix(olds[index], news[index]) if index < min(len(olds), len(news)) else 0
    messages = _messages(before, one, after, other)
    found.olds, found.news = [*olds[index:], *messages[0]], [*news[index:], *messages[1]]
    return found


def _first_field(olds: _Fields, news: _Fields) -> tuple[str, bytes, bytes]:
    """Return the first field that changed: its name, and its values. A value is empty if the field was added or
    removed."""
    for (name, old), (named, new) in zip([*olds, ("", b"")], [*news, ("", b"")], strict=False):
        if name == named and old != new:
            return name, old, new
        if name != named:
            came = named and named not in [each for each, _ in olds]
            return (named, b"", new) if came else (name or named, old, b"")
    return "", b"", b""


def _find_field_change(name: str, old: bytes, new: bytes, olds: list[bytes], news: list[bytes], index: int) -> Changed:
    if name in _LISTS:
        return tools_change(olds, news)
    if not old or not new:
        return Changed((), old, new, DifferenceKind.OTHER)
    if in_other_order(olds, news, 1):
        return Changed((index,), olds[index], news[index], DifferenceKind.REORDERED_CONTEXT)
    return change_of(old, new)


def _in_text(before: bytes, after: bytes, same: int, places: JsonPaths) -> Found:
    """Return the difference of two prompts that are not chats."""
    found = _locate_change(Changed((), before, after))
    _look_put_in(found)
    found.message, found.cut, found.olds, found.news = 0, same, [before], [after]
    found.path, found.at_bytes = places.plain(same)
    return found


def _look_put_in(found: Found) -> None:
    """Set the change of words of a template if a date or an identifier was added or removed with them."""
    if found.change is not None:
        return
    told = find_insertion(found.before, found.after, found.at)
    found.change = DifferenceKind.OTHER
    if told is not None and told.change is not None:
        found.change, found.spans = told.change, (told.before, told.after)


def _locate_change(changed: Changed, at: int | None = None) -> Found:
    """Return a change as a difference. `at` is its first byte, None to search for it."""
    _, before, after, change = changed
    at = common_prefix(before, after) if at is None else at
    if change is None and before != after:
        told = find_text_change(before, after, at)
        return Found(told.change, before, after, at, (told.before, told.after))
    tail = common_suffix(before, after, at)
    spans = word(before, at, len(before) - tail), word(after, at, len(after) - tail)
    return Found(change, before, after, at, spans)
