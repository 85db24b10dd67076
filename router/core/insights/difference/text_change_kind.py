"""Kind of a change in a text, determined from the two texts: the first difference decides.

White space is checked first, since no other kind resembles it. Order is next, since a passage that moved may begin with
a date or an identifier. Tokens at the first byte that differs are last. A token counts only if both texts continue
alike after it: otherwise the text was written anew, and any two log lines differ in their dates.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import NamedTuple

from router.core.insights.difference import volatile_values
from router.core.insights.difference.text_overlap import PIECES_MAX, common_suffix, lines_of, sentences_of
from router.core.insights.difference.volatile_values import Span
from router.core.types.cache_misses import DifferenceKind

SAME_BEHIND_BYTES = 5  # bytes that must be the same after a token for it to be the only change there
SAME_END_BYTES = 32  # common bytes at the texts' ends that show the same
MOVED_BYTES_MIN = 12  # a shorter piece is found in two places by chance
LINE_BYTES_MAX = 65_536  # longest line, and longest text that is compared by sentences and words
LINES_FEW_MAX = 3
OBJECTS_BEFORE_MAX = 16  # braces that may begin the JSON object that a byte is in
OBJECT_BYTES_MAX = 16_384  # bytes from an object's opening brace to the byte
PUT_IN_BYTES_MAX = 192  # longest text inserted before an old one that is searched for a date or an identifier
PUT_IN_SAME_BYTES = 12  # bytes of the old text that must continue after the inserted text

_SPACES = re.compile(rb"\s+")
# UTF-8 of wide spaces, or the beginning of it
_WIDE_SPACES = (b"\xc2\xa0", b"\xe2\x80", b"\xe3\x80\x80", b"\xef\xbb\xbf")
_ITEM = re.compile(rb"[^\s,;|]+")
_decode = json.JSONDecoder().raw_decode


class TextChange(NamedTuple):
    """Kind of a change with its span in the old and the new text. None: words, if no other kind is recognised."""

    change: DifferenceKind | None
    before: Span
    after: Span


def find_text_change(before: bytes, after: bytes, at: int) -> TextChange:
    """Return the change at byte `at`, the first at which the texts differ."""
    tail = common_suffix(before, after, at)
    ends = len(before) - tail, len(after) - tail
    spans = volatile_values.word(before, at, ends[0]), volatile_values.word(after, at, ends[1])
    if _spaces(before, after, at, tail):
        return TextChange(
            DifferenceKind.WHITESPACE, (at, _find_spaces_end(before, at)), (at, _find_spaces_end(after, at))
        )
    if _keys_moved(before, after, at):
        return TextChange(DifferenceKind.KEY_ORDER, *spans)
    if is_reordered(before, after, at, tail):
        return TextChange(DifferenceKind.REORDERED_CONTEXT, *spans)
    for change, look in _KINDS:
        found = look(before, after, at)
        if found is not None and _goes_on(before, found[0][1], after, found[1][1], tail):
            return TextChange(change, *found)
    return TextChange(_put_in(before[at : ends[0]], after[at : ends[1]]), *spans)


_KINDS = (
    (DifferenceKind.TIMESTAMP, volatile_values.stamps),
    (DifferenceKind.IDENTIFIER, volatile_values.identifiers),
    (DifferenceKind.COUNTER, volatile_values.numbers),
)


def _goes_on(before: bytes, end: int, after: bytes, other: int, tail: int) -> bool:
    """True if the texts are alike after a token, except for numbers."""
    if tail >= min(SAME_END_BYTES, len(after) - other) and tail >= min(SAME_END_BYTES, len(before) - end):
        return True
    ones = volatile_values.digitless(before[end : end + 4 * SAME_BEHIND_BYTES])
    others = volatile_values.digitless(after[other : other + 4 * SAME_BEHIND_BYTES])
    return ones[:SAME_BEHIND_BYTES] == others[:SAME_BEHIND_BYTES]


def _put_in(before: bytes, after: bytes) -> DifferenceKind | None:
    """Return TIMESTAMP if only one of the two texts is non-empty and it is a date or a time, else None."""
    gone, come = before.strip(), after.strip()
    if bool(gone) == bool(come):
        return None
    return DifferenceKind.TIMESTAMP if volatile_values.is_stamp(gone or come) else None


def find_insertion(before: bytes, after: bytes, at: int) -> TextChange | None:
    """Find a date or an identifier in a short text that was inserted or removed at byte `at`: the effect of a release
    shows in one prompt before it and one after it. None if the old text does not continue after it."""
    for old, new, came in ((before, after, True), (after, before, False)):
        same = old[at : at + PUT_IN_SAME_BYTES]
        if len(same) == PUT_IN_SAME_BYTES:
            end = new.find(same, at + 1, at + PUT_IN_BYTES_MAX + PUT_IN_SAME_BYTES)
        else:
            end = len(new) if not same and len(new) - at <= PUT_IN_BYTES_MAX else -1
        found = volatile_values.token(new, at, end) if end > at else None
        if found is not None:
            change = DifferenceKind.TIMESTAMP if found[0] else DifferenceKind.IDENTIFIER
            spans = ((at, at), found[1]) if came else (found[1], (at, at))
            return TextChange(change, *spans)
    return None


def _find_spaces_end(text: bytes, at: int) -> int:
    found = _SPACES.match(text, at)
    return found.end() if found else at


def _spaces(before: bytes, after: bytes, at: int, tail: int) -> bool:
    """True if only white space differs: at this byte, and in the following text for at least a line's length."""
    if not (_blank(before, at) or _blank(after, at)):
        return False
    one, other = before[at : len(before) - tail], after[at : len(after) - tail]
    if b"".join(one.split()) == b"".join(other.split()):
        return True
    if not (one + other).isascii():
        one, other = ("".join(text.decode(errors="replace").split()).encode() for text in (one, other))
        if one == other:
            return True
    here, there = before[at : at + 256].split(), after[at : at + 256].split()
    return _alike(b"".join(here), b"".join(there))


def _blank(text: bytes, at: int) -> bool:
    return text[at : at + 1].isspace() or text.startswith(_WIDE_SPACES, at)


def _alike(one: bytes, other: bytes) -> bool:
    """True if the first 48 bytes are the same, white space removed."""
    return len(one) >= 48 and one[:48] == other[:48]


def _keys_moved(before: bytes, after: bytes, at: int) -> bool:
    """True if the byte is in a JSON object that is the same except for the order of its keys."""
    low, end = max(0, at - OBJECT_BYTES_MAX), at
    if b'"' not in before[at - 1 : at + 1] and b'"' not in before[max(0, at - 64) : at]:
        return False
    for _ in range(OBJECTS_BEFORE_MAX):
        end = before.rfind(b"{", low, end)
        if end < 0:
            return False
        one, other = _object(before, end), _object(after, end)
        if one is not None and _equal(one, other):
            return True
        if one is not None and other is not None and before.find(b'"', end, at) < 0:
            return False
    return False


def _equal(one: object, other: object) -> bool:
    try:
        return one == other
    except RecursionError:  # nested too deep to be compared, though not too deep to be read
        return False


def _object(text: bytes, start: int) -> object:
    """Return the JSON object that begins there, or None."""
    try:
        found = _decode(text[start : start + 2 * OBJECT_BYTES_MAX].decode(errors="replace"))[0]
    except (ValueError, RecursionError):
        return None
    return found


def is_reordered(before: bytes, after: bytes, at: int, tail: int) -> bool:
    """True if most of the new text is the old one in another order: by lines, or if these are few, sentences or
    words."""
    start = max(before.rfind(b"\n", 0, at) + 1, at - LINE_BYTES_MAX)
    one, other = [_to_line_end(text, start, len(text) - tail) for text in (before, after)]
    ones, others = [text.split(b"\n\n", PIECES_MAX) for text in (one, other)]  # lines of passages may be much alike
    if in_other_order(ones, others, MOVED_BYTES_MIN):
        return True
    if in_other_order(lines_of(one), lines_of(other), MOVED_BYTES_MIN):
        return True
    if max(len(one), len(other)) > LINE_BYTES_MAX or min(one.count(b"\n"), other.count(b"\n")) > LINES_FEW_MAX:
        return False
    if in_other_order(sentences_of(one), sentences_of(other), MOVED_BYTES_MIN):
        return True
    ones, others = _ITEM.findall(one), _ITEM.findall(other)
    return len(ones) > 2 and Counter(ones) == Counter(others)


def _to_line_end(text: bytes, start: int, end: int) -> bytes:
    """Return the text from `start` to the end of the line that byte `end` is in."""
    stop = text.find(b"\n", end, end + LINE_BYTES_MAX)
    return text[start : stop if stop >= 0 else end + LINE_BYTES_MAX]


def in_other_order(before: list[bytes], after: list[bytes], least: int) -> bool:
    """True if at least half of the bytes of either are pieces of both, not in the same order. Numbers are ignored, as
    passages may be renumbered."""
    if _has_moved_pieces(before, after, least):
        return True
    ones, others = [volatile_values.digitless(b"\0".join(pieces)).split(b"\0") for pieces in (before, after)]
    return (ones != before or others != after) and _has_moved_pieces(ones, others, least)


def _has_moved_pieces(before: list[bytes], after: list[bytes], least: int) -> bool:
    ones, others = _unique(before, least), _unique(after, least)
    kept = [piece for piece in ones if piece in others]
    if len(kept) < 2 or 2 * sum(map(len, kept)) < min(sum(map(len, before)), sum(map(len, after))):
        return False
    return kept != [piece for piece in others if piece in ones]


def _unique(pieces: list[bytes], least: int) -> dict[bytes, None]:
    plain = [piece.strip(b" \t\r\n,;") for piece in pieces]
    times = Counter(plain)
    return {piece: None for piece in plain if times[piece] == 1 and len(piece) >= least}
