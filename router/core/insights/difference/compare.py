"""First difference of two prompts: its position and kind, and the bytes that are computed again because of it.

Both are canonical bytes (prompts/canonical.py). The first byte that differs is found by bisection.

Prompts that part and never meet again have no difference in this sense: the whole rest is new, as in a conversation on
a shared system prompt, or after a regenerated answer.
"""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from router.core.insights.difference.first_difference import Found, find
from router.core.insights.difference.json_paths import JsonPaths
from router.core.insights.difference.text_overlap import common_prefix, find_unmatched, repeated_lines
from router.core.insights.difference.volatile_values import shape
from router.core.types.cache_misses import EXCERPT_CHARS_MAX, Difference, DifferenceKind

REPEATED_BYTES_MIN = 64  # about a block of an engine: less is not computed again for any reason
REPEATED_SHARE_MIN = 16  # 1 in this number of bytes after a difference must repeat; fewer repeat by chance
ALIKE_SHARE_MIN = 4  # two messages are the same one, changed, if they share at least 1/4 of the shorter
ALIKE_WORDS_SHARE_MIN = 2  # reworded messages must share 1/2 of the longer: any two questions have phrases in common
PIECE_BYTES_MIN = 64  # text that replaces another counts as at least this number of bytes
CONTEXT_BYTES = 60  # bytes shown around a difference, in excerpts
ROLES = ("", "system", "developer", "user", "assistant", "tool", "function")
_TOKENS = (DifferenceKind.TIMESTAMP, DifferenceKind.IDENTIFIER, DifferenceKind.COUNTER)
OTHER_ROLE = "other"  # any other role: chosen by a client, or forged by a text, so it is not shown


class Compared(NamedTuple):
    """Comparison of a new prompt with an earlier one. Bytes are canonical bytes of the new one."""

    difference: Difference | None  # None: the prompts do not differ, or no text repeats after the difference
    repeated_bytes: int  # bytes computed again: text that repeats after the first difference, and the change itself
    same_bytes: int  # bytes before the first difference
    appended: bool  # the new prompt begins with the whole earlier one


def compare(
    before: bytes, after: bytes, *, from_bytes: int = 0, body: bytes = b"", path: str = "", excerpts: bool = False
) -> Compared:
    """Compare an earlier prompt with a new one, both whole. Their first `from_bytes` are known to be the same. `body`
    and `path` are of the new prompt's request, and name places in it."""
    same = common_prefix(before, after, from_bytes)
    if same == len(before) or same == len(after):
        return Compared(None, 0, same, same == len(before))
    found = find(before, after, same, JsonPaths(path, body))
    repeated = _count_repeated_bytes(found, len(before) - same, len(after) - same)
    if not repeated:
        return Compared(None, 0, same, False)
    return Compared(_difference(found, same, repeated, excerpts=excerpts), repeated, same, False)


def _count_repeated_bytes(found: Found, behind: int, behind_new: int) -> int:
    """Count the bytes that are computed again, 0 if the prompts part for good. `behind` and `behind_new` are the bytes
    of the earlier and the new prompt from the first difference on."""
    if found.items and not _same_messages(found):
        return 0
    old, new = found.olds[:1], found.news[:1]
    olds, news, exact = find_unmatched(found.olds, found.news)
    if new and news[:1] != new:
        exact -= found.cut
    if old and olds[:1] == old:
        olds[0] = olds[0][found.cut :]
    if new and news[:1] == new:
        news[0] = news[0][found.cut :]
    lines = repeated_lines(olds, news)
    size, piece, alike = exact + lines, 0, False
    if found.placed and old and new:
        one, other = old[0][found.cut :], new[0][found.cut :]
        own = lines if (olds, news) == ([one], [other]) else repeated_lines([one], [other])
        alike = _alike(found, own, len(one), len(other))
        piece = min(_piece_bytes(found, len(one) - own), len(other) - own)
    if found.change is DifferenceKind.TOOL_ADDED:
        piece = len(found.after)
    counts = size + piece if alike or (found.placed and exact > 0) else size
    if counts < REPEATED_BYTES_MIN or counts * REPEATED_SHARE_MIN < min(behind, behind_new):
        return 0
    return min(size + piece, behind_new) if exact > 0 or alike or found.message < 0 else 0


def _same_messages(found: Found) -> bool:
    """True if messages repeat after added or removed tools. If none do, another agent has some of the same tools."""
    olds, news, exact = find_unmatched(found.olds[found.items[0] :], found.news[found.items[1] :])
    return exact + repeated_lines(olds, news) >= REPEATED_BYTES_MIN


def _alike(found: Found, own: int, size: int, size_new: int) -> bool:
    """True if two messages in one place are the same one, changed. They have `own` bytes in common."""
    if found.change in (DifferenceKind.WHITESPACE, DifferenceKind.KEY_ORDER):
        return True
    if found.change in (DifferenceKind.EDITED_HISTORY, DifferenceKind.TRUNCATED_HISTORY):
        return own > 0 and own * ALIKE_WORDS_SHARE_MIN >= max(size, size_new)
    return own > 0 and own * ALIKE_SHARE_MIN >= min(size, size_new)


def _piece_bytes(found: Found, replaced: int) -> int:
    """Count the bytes of the change itself: a token, all text that is only written in another way, or replacing
    text."""
    if found.change in (DifferenceKind.WHITESPACE, DifferenceKind.KEY_ORDER):
        return len(found.after)
    if found.change in _TOKENS:
        return found.spans[1][1] - found.at
    return max(replaced, PIECE_BYTES_MIN)


def _difference(found: Found, same: int, repeated: int, *, excerpts: bool) -> Difference:
    piece = found.after[slice(*found.spans[1])] or found.before[slice(*found.spans[0])]
    token_bytes = -1
    if found.change in _TOKENS:
        token_bytes = max(0, found.at_bytes + found.spans[1][0] - found.at)
    return Difference(
        found.change or DifferenceKind.OTHER,
        found.message,
        found.role if found.role in ROLES else OTHER_ROLE,
        found.path,
        same,
        found.at_bytes,
        repeated,
        shape(piece),
        xxh3_64_intdigest(piece),
        _excerpt(found.before, found.at, found.spans[0][1]) if excerpts else "",
        _excerpt(found.after, found.at, found.spans[1][1]) if excerpts else "",
        token_bytes,
    )


def _excerpt(text: bytes, at: int, end: int) -> str:
    low = max(0, at - CONTEXT_BYTES)
    return text[low : max(at, end) + CONTEXT_BYTES].decode(errors="replace")[:EXCERPT_CHARS_MAX]
