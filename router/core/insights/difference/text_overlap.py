"""Alignment of two texts: the point at which they part, and the part of one that the other repeats after it.

Repetition is counted in pieces of decreasing size: whole messages and tools, then their lines, then sentences, as a
multiset each time. The remaining pieces are paired in order, and the common ends of a pair count. Each step is linear
in the size of the texts, and bytes are compared in slices, at the speed of C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

PIECES_MAX = 4_096  # pieces of one kind in one text; the rest of the text counts as one
PAIRS_MAX = 512  # pairs of pieces that match no other
PARTS_MAX = 4_096  # pairs of sentences in all pairs of lines together; each pair of lines gets a few
PARTS_OF_PAIR_MIN = 8
LINE_BYTES_MIN = 8  # a shorter line repeats by chance, unless the one before it did too
SENTENCE_BYTES_MIN = 24
SPLIT_BYTES_MIN = 128  # a pair of lines that differ in more is compared by sentences
_STEP_BYTES = 256

_ENDS = (b"? ", b"! ", b"; ", b"}, ", b"},", b"> ", b"| ", b"\n")


def common_prefix(one: bytes, other: bytes, start: int = 0) -> int:
    """Count the bytes that both begin with. `start` of them are known to be the same."""
    end, step = min(len(one), len(other)), _STEP_BYTES
    at = min(start, end)
    while at < end and one[at : at + step] == other[at : at + step]:
        at += step
        step *= 2
    if at >= end:
        return end
    stop = min(at + step, end)
    while stop > at:  # the texts are the same before `at`, and part before `stop`, if at all
        middle = (at + stop + 1) // 2
        if one[at:middle] == other[at:middle]:
            at = middle
        else:
            stop = middle - 1
    return at


def common_suffix(one: bytes, other: bytes, least: int = 0) -> int:
    """Count the bytes that both end with, without the first `least` of either."""
    end, step, size = min(len(one), len(other)) - least, _STEP_BYTES, 0
    ones, others = len(one), len(other)
    while size < end:
        more = min(size + step, end)
        if one[ones - more : ones - size] != other[others - more : others - size]:
            break
        size, step = more, step * 2
    stop = min(size + step, end)
    while stop > size:
        middle = (size + stop + 1) // 2
        if one[ones - middle : ones - size] == other[others - middle : others - size]:
            size = middle
        else:
            stop = middle - 1
    return max(size, 0)


def cut(text: bytes, places: Iterable[int]) -> list[bytes]:
    """Cut the text into pieces that begin at `places`, which ascend. All bytes up to the second place are the first
    piece."""
    found = list(islice(places, PIECES_MAX))
    return [text[start:end] for start, end in pairwise([*found, len(text)])]


def lines_of(text: bytes) -> list[bytes]:
    """Return the lines with their ends."""
    lines = text.split(b"\n", PIECES_MAX)
    return [*[line + b"\n" for line in lines[:-1]], *([lines[-1]] if lines[-1] else [])]


def sentences_of(text: bytes) -> list[bytes]:
    """Cut the text at full stops and similar marks."""
    for end in _ENDS:
        text = text.replace(end, b". ")
    return text.split(b". ", PIECES_MAX)


def find_unmatched(before: list[bytes], after: list[bytes], least: int = 0) -> tuple[list[bytes], list[bytes], int]:
    """Return the pieces that only one of them has, in order, and the number of bytes in `after` that `before` has too,
    in any order.

    Pieces below `least` bytes match only directly after one that did.
    """
    pool = Counter(before)
    alone, size, matched = [], 0, False
    for piece in after:
        matched = (matched or len(piece) >= least) and pool.get(piece, 0) > 0
        if matched:
            pool[piece] -= 1
            size += len(piece)
        else:
            alone.append(piece)
    return list(_iter_unmatched(before, pool)), alone, size


def _iter_unmatched(pieces: list[bytes], pool: Counter[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        if pool[piece] > 0:
            pool[piece] -= 1
            yield piece


def repeated_lines(before: list[bytes], after: list[bytes]) -> int:
    """Count the bytes of the texts `after` that the texts `before` have too, by lines. The first texts of both begin
    with the first byte that differs."""
    end = 0
    if len(before) == len(after) == 1:  # most often only the beginnings of two long texts differ
        end = _lines_at_end(before[0], after[0])
        before, after = [before[0][: len(before[0]) - end]], [after[0][: len(after[0]) - end]]
    olds = [line for text in before for line in lines_of(text)]
    news = [line for text in after for line in lines_of(text)]
    first = olds[:1], news[:1]
    olds, news, size = find_unmatched(olds, news, LINE_BYTES_MIN)
    parts = max(PARTS_OF_PAIR_MIN, min(PAIRS_MAX, PARTS_MAX // (min(len(olds), len(news)) or 1)))
    both = islice(zip(olds, news, strict=False), PAIRS_MAX)
    pairs = [_count_common_bytes(old, new, SPLIT_BYTES_MIN, parts) for old, new in both]
    if pairs and (olds[:1], news[:1]) != first:
        pairs[0] = _count_if_alike(pairs[0], news[0])
    return (
        end + size + sum(pairs[:1]) + sum([_count_if_alike(*pair) for pair in zip(pairs[1:], news[1:], strict=False)])
    )


def _lines_at_end(one: bytes, other: bytes) -> int:
    """Count the bytes of whole lines that both end with."""
    tail = common_suffix(one, other)
    start = other.find(b"\n", len(other) - tail)
    return len(other) - start - 1 if start >= 0 else 0


def _count_if_alike(same: int, new: bytes) -> int:
    """Return the common bytes of a pair that was paired by its place only. 0 unless they are at least half of the new
    piece."""
    return same if 2 * same >= len(new) else 0


def _count_common_bytes(old: bytes, new: bytes, split_bytes: int, parts_max: int) -> int:
    """Count the bytes of a line that another has too. At most `parts_max` of its sentences are compared."""
    head = common_prefix(old, new)
    tail = common_suffix(old, new, head)
    size = head + tail
    if min(len(old), len(new)) - size < split_bytes:
        return size
    olds, news = sentences_of(old[head : len(old) - tail]), sentences_of(new[head : len(new) - tail])
    olds, news, more = find_unmatched(olds, news, SENTENCE_BYTES_MIN)
    pairs = islice(zip(olds, news, strict=False), parts_max)
    return (
        size
        + more
        + sum([_count_if_alike(_count_common_bytes(one, other, len(new) + 1, 0), other) for one, other in pairs])
    )
