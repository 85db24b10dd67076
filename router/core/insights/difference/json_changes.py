"""First difference of two JSON values, and a check for a mere change of order.

Values are walked from the top, the two side by side, into the first child with different JSON. Children are compared as
JSON text, since equal dicts may print their keys in another order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from router.core.insights.difference.text_change_kind import find_text_change
from router.core.insights.difference.text_overlap import common_prefix
from router.core.prompts.json_fields import UNREADABLE
from router.core.types.cache_misses import DifferenceKind

STEPS_MAX = 64
WALKED_BYTES_MAX = 4 << 20  # JSON encoded again on the way down: the JSON of each level includes all levels below it
Steps = tuple[str | int, ...]


class Changed(NamedTuple):
    """The innermost value that changed. `before` and `after` are its texts, or its JSON if the value is not a text."""

    steps: Steps  # path from the top to the value
    before: bytes
    after: bytes
    change: DifferenceKind | None = None  # None: to be determined from the two texts


def first_change(before: object, after: object) -> Changed:
    """Return the innermost difference of two values with different JSON."""
    steps: list[str | int] = []
    walked_bytes = 0
    while len(steps) < STEPS_MAX and walked_bytes < WALKED_BYTES_MAX:
        step: str | int | None = None
        change: DifferenceKind | None = None
        if isinstance(before, dict) and isinstance(after, dict):
            step, change = _in_dicts(before, after)
        elif isinstance(before, list) and isinstance(after, list):
            step, change = _in_lists(before, after)
        if step is None:
            return Changed(tuple(steps), text_of(before), text_of(after), change)
        steps.append(step)
        before, after = before[step], after[step]  # type: ignore[index]  # both have it
        walked_bytes += len(text_of(after))
    return Changed(tuple(steps), text_of(before), text_of(after))


def _in_dicts(before: dict[str, Any], after: dict[str, Any]) -> tuple[str | None, DifferenceKind | None]:
    for one, other in zip(before, after, strict=False):
        if one != other:
            return None, DifferenceKind.KEY_ORDER if before.keys() == after.keys() else None
        if text_of(before[one]) != text_of(after[one]):
            return one, None
    return None, None


def _in_lists(before: list[Any], after: list[Any]) -> tuple[int | None, DifferenceKind | None]:
    ones, others = [*map(text_of, before)], [*map(text_of, after)]
    if Counter(ones) == Counter(others):
        return None, DifferenceKind.KEY_ORDER  # a set, such as `required`, printed in arbitrary order
    for index, (one, other) in enumerate(zip(ones, others, strict=False)):
        if one != other:
            return index, None
    return None, None


def text_of(value: object) -> bytes:
    """Return a string unchanged, any other value as JSON."""
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    return msgspec.json.encode(value)


def decode_json(value: bytes) -> Any:  # noqa: ANN401  # JSON of any kind
    """Decode the value. None if it is not JSON."""
    try:
        return msgspec.json.decode(value)
    except UNREADABLE:
        return None


def change_of(before: bytes, after: bytes) -> Changed:
    """Return the innermost difference of two JSON texts that are not the same, or of the whole texts if one cannot be
    read."""
    try:
        return first_change(msgspec.json.decode(before), msgspec.json.decode(after))
    except UNREADABLE:
        return Changed((), before, after)


def items_of(value: bytes) -> list[bytes]:
    """Return the JSON of each item of a list, or the whole if it is not a list."""
    try:
        return [*map(bytes, msgspec.json.decode(value, type=list[Raw]))]
    except UNREADABLE:
        return [value]


def tools_change(before: list[bytes], after: list[bytes]) -> Changed:
    """Return the difference of two lists of tools: the first tool that is not at its earlier place, or the change in
    it."""
    index = next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), None)
    if index is None:  # one is longer
        index = min(len(before), len(after))
        one, other = [each[index] if index < len(each) else b"" for each in (before, after)]
        return Changed((index,), one, other, DifferenceKind.TOOL_REMOVED if one else DifferenceKind.TOOL_ADDED)
    ones, others = [*map(tool_name, before)], [*map(tool_name, after)]
    if (change := _find_name_change(ones, others, index)) is not None:
        return Changed((index,), ones[index], others[index], change)
    inner = change_of(before[index], after[index])
    return inner._replace(steps=(index, *inner.steps))


def _find_name_change(before: list[bytes], after: list[bytes], index: int) -> DifferenceKind | None:
    if before[index] == after[index]:
        return None  # the tool itself changed, before any tool that was added, removed or moved
    olds, news = set(before), set(after)
    if [name for name in before if name in news] != [name for name in after if name in olds]:
        return DifferenceKind.TOOL_ORDER
    one, other = before[index], after[index]
    if len(before) == len(after) and one not in news and other not in olds:  # a name in place of another
        named = find_text_change(one, other, common_prefix(one, other)).change
        return DifferenceKind.TOOL_ADDED if named is None else named
    return DifferenceKind.TOOL_ADDED if other not in olds else DifferenceKind.TOOL_REMOVED


def tool_name(tool: bytes) -> bytes:
    """Return a tool's name, or the tool itself if it has no name."""
    value = decode_json(tool)
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name.encode(errors="surrogatepass") if isinstance(name, str) else tool
