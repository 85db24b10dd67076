"""Texts of earlier prompts: a radix tree of texts by reference, under a strict bound of bytes.

Each kept prompt is a `Record`: the record with which it shares its beginning, the number of shared bytes, and its own
text after them. So turn n+1 of a conversation costs only the text that it adds. `owners` leads from each block's key to
a record that has the block, so the deepest known block is found by bisection. Within the next block, texts are compared
byte by byte. If several records continue differently after one block, `forks` has these continuations in order: the
nearest neighbours of a text share the longest prefix with it. `ends` leads from the key of a whole prompt to its
record. It finds a repeated prompt, or one that continues after an answer, without any of these steps.

Two generations bound the memory. A used record is in the young one. When that is full it becomes the old one, and the
old one is freed, a few entries with each prompt that is kept, since a million entries are not freed within a
millisecond. No young record refers to an old one: a prompt that continues an old record is kept whole again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.core.prompts.block_keys import BLOCK_BYTES, key_at
from router.core.prompts.canonical import RS

# Sizes in bytes as tracemalloc measures them, including dicts that have just grown (CPython 3.11, 64-bit).
KEY_BYTES = 125  # one entry of a dict: its slot, its key
RECORD_BYTES = 420  # one record without its text
FORK_BYTES = 90  # one continuation, without its text; a place in two lists
FORKS_BYTES = 400  # one ChildEdges, which leads to several records
LINKS_MAX = 128  # consecutive records: a longer chain is made whole, so that it is walked and freed quickly
SWEEP_RATIO = 3  # entries freed for each that is kept
RUN_SIBLINGS_MAX = 512  # siblings in one run: a longer run is cut in two
COMMON_BYTES = 128  # bytes compared at a time, then as a number
CANDIDATES_MAX = 8  # records that are tried if the beginning of a block was skipped

_number = int.from_bytes


class Record(Struct, gc=False, eq=False):
    """One prompt. It has no reference cycle: parents are older."""

    parent: Record | None
    start: int  # bytes that it shares with its parent
    own: bytes  # text of the prompt after the shared bytes
    end: int  # length of the prompt, or of its kept part
    root: int
    links: int = 0  # records above it
    conversation: int = 0
    turn: int = 0
    template: int = 0
    tool_calls: int = 0
    tools: bool = False
    asked: int = 1  # number of requests for this same prompt
    children: int = 0  # prompts that continue after its whole text


class ChildEdges(Struct, gc=False, eq=False):
    """Continuations of records after one block: up to a block of each one's text, in order. None begins with another. A
    hundred thousand users may ask different questions after one system prompt, so they are stored in runs, of which one
    is written at a time."""

    tails: list[list[bytes]]
    records: list[list[Record]]
    firsts: list[bytes]  # first tail of each run
    count: int = 1

    def place(self, tail: bytes) -> tuple[int, int]:
        """Return the run to which a text belongs, and its place there."""
        firsts = self.firsts
        run = bisect_right(firsts, tail, 1) - 1 if len(firsts) > 1 else 0
        return run, bisect_left(self.tails[run], tail)

    def nearest(self, tail: bytes) -> tuple[Record, int, int, int]:
        """Return the record with the longest common beginning, and its number of bytes; then the text's own run and
        place."""
        firsts = self.firsts
        run = bisect_right(firsts, tail, 1) - 1 if len(firsts) > 1 else 0
        tails, records = self.tails[run], self.records[run]
        at = bisect_left(tails, tail)
        before = common(tails[at - 1], tail) if at else -1
        if at < len(tails):
            behind, record = tails[at], records[at]
        elif run + 1 < len(firsts):
            behind, record = firsts[run + 1], self.records[run + 1][0]
        else:
            return records[at - 1], before, run, at
        if behind.startswith(tail[: before + 1]):
            shared = common(behind, tail)
            if shared > before:
                return record, shared, run, at
        return records[at - 1], before, run, at

    def add(self, tail: bytes, record: Record, run: int, at: int) -> None:
        """Insert a record in order. It replaces one that it begins with."""
        tails, records = self.tails[run], self.records[run]
        if at and tail.startswith(tails[at - 1]):
            at -= 1
            tails[at], records[at] = tail, record
        else:
            tails.insert(at, tail)
            records.insert(at, record)
            self.count += 1
        if not at:
            self.firsts[run] = tail
        if len(tails) > RUN_SIBLINGS_MAX:
            half = len(tails) // 2
            self.firsts.insert(run + 1, tails[half])
            self.tails.insert(run + 1, tails[half:])
            self.records.insert(run + 1, records[half:])
            del tails[half:], records[half:]


class Text(Struct, eq=False):
    """A prompt to search for. `text` is the part after `base`; both are cut at `size`."""

    keys: list[int]
    root: int
    end_key: int  # 0 if the prompt was cut
    text: bytes
    base: int
    size: int
    # number with which keys and root are XORed, so that a tenant's prompts match only each other; 0: no separation
    whose: int

    def tail(self, record: Record, depth: int) -> bytes | None:
        """Return up to a block of text after `depth` blocks. If the beginning of this text was skipped it is taken from
        the record. None if the keys prove that the record has another text there."""
        at = depth * BLOCK_BYTES
        skipped = self.base - at
        if skipped <= 0:
            return self.text[-skipped : BLOCK_BYTES - skipped]
        lead = piece(record, at, self.base) if skipped < BLOCK_BYTES else b""
        if len(lead) < skipped:
            return None
        tail = lead + self.text[: BLOCK_BYTES - skipped]
        parent = self.keys[depth - 1] if depth else self.root
        if depth < len(self.keys):
            return tail if xxh3_64_intdigest(tail, parent ^ self.whose) == self.keys[depth] ^ self.whose else None
        return tail if key_at(tail, (), parent ^ self.whose, len(tail)) == self.end_key ^ self.whose else None


class Match(Struct, gc=False, eq=False):
    """The longest prefix of a text that one generation has."""

    record: Record | None = None
    known: int = 0  # bytes
    depth: int = 0  # blocks
    tail: bytes = b""  # up to a block of the text after them
    siblings: ChildEdges | None = None  # records that continue after these blocks, if there are several
    run: int = 0  # run of the siblings to which the text belongs
    at: int = 0
    lacks: bool = False  # the skipped part of the text is unknown here: no match after the blocks is certain


class Generation:
    """All that is learned in one span of time."""

    __slots__ = ("ends", "forks", "held_bytes", "latest", "marks", "owners")

    def __init__(self) -> None:
        self.owners: dict[int, Record] = {}  # root or key -> a record that continues after it, or ends there
        self.ends: dict[int, Record] = {}  # key of a whole prompt -> its record
        self.forks: dict[
            int, ChildEdges
        ] = {}  # root or key -> the records that continue after it, if there are several
        self.latest: dict[int, Record] = {}  # conversation -> its latest prompt
        self.marks: dict[int, int] = {}  # mark (hash of a piece of text) -> the latest conversation with it
        self.held_bytes = 0

    def match(self, said: Text) -> Match:
        """Return the longest prefix of a text that any record has."""
        owners, keys = self.owners, said.keys
        depth = _depth(owners, keys)
        node = keys[depth - 1] if depth else said.root
        record = owners.get(node)
        if record is None:
            return Match()
        at = depth * BLOCK_BYTES
        siblings = self.forks.get(node)
        skipped = said.base - at
        tail: bytes | None
        tail = said.text[-skipped : BLOCK_BYTES - skipped] if skipped <= 0 else said.tail(record, depth)
        if tail is None and siblings is not None:
            tried = siblings.records[0][:CANDIDATES_MAX]
            tail = next((found for each in tried if (found := said.tail(each, depth)) is not None), None)
        if tail is None:
            return Match(record, at, depth, b"", siblings, 0, 0, True)
        if siblings is not None:
            record, shared, run, place = siblings.nearest(tail)
            return Match(record, at + shared, depth, tail, siblings, run, place)
        theirs = piece(record, at, at + BLOCK_BYTES)
        return Match(record, at + (len(theirs) if tail.startswith(theirs) else common(theirs, tail)), depth, tail)


class Texts:
    """All remembered texts: a young and an old generation."""

    def __init__(self, bytes_max: int) -> None:
        self._half_bytes = bytes_max // 2
        self.young, self.old = Generation(), Generation()
        self.forgot = False  # True after the first eviction
        self._dying: list[dict[int, Any] | list[Any]] = []

    def match(self, said: Text) -> tuple[Match, Match]:
        """Return the longest match of the young generation, and the longest of either."""
        young = self.young.match(said)
        return young, self.find_longest_match(said, young, aged=True)

    def find_longest_match(self, said: Text, young: Match, *, aged: bool) -> Match:
        """Return the longest match of either generation. The old generation is not searched if the young one knows all
        except the prompt's last message, unless a part of the prompt is `aged`."""
        old = self.old.owners
        if not old or young.known == said.size or said.root not in old:
            return young
        if young.record is not None and not aged:
            last = said.text.rfind(RS)
            if (last > 0 and young.known > said.base + last) or said.keys[0] not in old:
                return young
        match = self.old.match(said)
        return match if match.known > young.known else young

    def latest(self, conversation: int) -> Record | None:
        """Return the latest prompt of a conversation."""
        return self.young.latest.get(conversation) or self.old.latest.get(conversation)

    def find_conversation(self, mark: int) -> int:
        """Return the latest conversation with this mark, 0 if it is unknown."""
        return self.young.marks.get(mark) or self.old.marks.get(mark, 0)

    def keep(self, said: Text, young: Match, known: Match, record: Record, marks: Sequence[int]) -> None:
        """Remember a prompt, for which `match` has just returned `young` and `known`. `marks` lead to its conversation.
        The shared part and the length of the `record` are set here."""
        keys, depth, start, base = said.keys, young.depth, young.known, said.base
        other = parent = young.record
        if parent is not None:
            links = parent.links + 1
            if links > LINKS_MAX:
                parent, start, links = None, 0, 0
            record.parent, record.links = parent, links
        own = said.text[start - base :] if start >= base else _rest(said, start, known)
        record.start, record.own, record.end, record.root = start, own, said.size, said.root
        held = RECORD_BYTES + len(own)
        if other is None:
            owned = [said.root, *keys]
        elif young.siblings is not None and not young.lacks:
            tail, owned = young.tail, keys[depth:]
            young.siblings.add(tail, record, young.run, young.at)
            held += FORK_BYTES + len(tail)
        elif young.siblings is not None or young.known < other.end:
            held += self._fork(said, young, other, record)
            owned = keys[depth:]
        else:  # the record with the longest part owns the shared keys
            owned = keys[depth - 1 :] if depth else [said.root, *keys]
        self.index_record(record, said.end_key, owned, marks, held)

    def append(self, keys: list[int], end_key: int, before: Record, record: Record, marks: Sequence[int]) -> None:
        """Remember a prompt that begins with a whole young record, and is the first to do so."""
        at = before.end
        depth = at // BLOCK_BYTES
        own, node = record.own, keys[depth - 1] if depth else record.root
        siblings, held = self.young.forks.get(node), RECORD_BYTES + len(own)
        if siblings is None:
            owned = keys[depth - 1 :] if depth else [node, *keys]
        else:
            owned, lead = keys[depth:], piece(before, depth * BLOCK_BYTES, at)
            tail = lead + own[: BLOCK_BYTES - len(lead)]
            siblings.add(tail, record, *siblings.place(tail))
            held += FORK_BYTES + len(tail)
        self.index_record(record, end_key, owned, marks, held)

    def index_record(self, record: Record, end_key: int, owned: list[int], marks: Sequence[int], held: int) -> None:
        """Let the `owned` keys lead to this record, which takes `held` bytes in addition to its entries."""
        generation, conversation = self.young, record.conversation
        generation.owners.update(dict.fromkeys(owned, record))
        generation.ends[end_key] = generation.latest[conversation] = record
        for mark in marks:
            generation.marks[mark] = conversation
        entries = len(owned) + len(marks) + 2
        held += generation.held_bytes + entries * KEY_BYTES
        generation.held_bytes = held
        if self._dying:
            self._sweep(entries * SWEEP_RATIO)
        if held > self._half_bytes:
            self._age()

    def _fork(self, said: Text, young: Match, other: Record, record: Record) -> int:
        """Add one more continuation after the known part. Returns the bytes that it takes."""
        siblings, depth, tail, held = young.siblings, young.depth, young.tail, 0
        at, run, place = depth * BLOCK_BYTES, young.run, young.at
        if young.lacks:
            tail = piece(record, at, at + BLOCK_BYTES)
        if siblings is None:
            theirs = piece(other, at, at + BLOCK_BYTES)
            siblings = ChildEdges([[theirs]], [[other]], [theirs])
            self.young.forks[said.keys[depth - 1] if depth else said.root] = siblings
            held = FORKS_BYTES + FORK_BYTES + KEY_BYTES + len(theirs)
            run, place = 0, int(theirs < tail)
        elif young.lacks:
            run, place = siblings.place(tail)
        siblings.add(tail, record, run, place)
        return held + FORK_BYTES + len(tail)

    def _age(self) -> None:
        dropped, self.old, self.young = self.old, self.young, Generation()
        self.forgot = self.forgot or bool(dropped.owners)
        self._dying = [dropped.owners, dropped.ends, dropped.forks, dropped.latest, dropped.marks]

    def _sweep(self, entries: int) -> None:
        dying = self._dying
        while dying and entries > 0:
            table = dying[-1]
            if not table:
                dying.pop()
                continue
            gone = table.popitem()[1] if isinstance(table, dict) else table.pop()
            entries -= 1
            if isinstance(gone, ChildEdges) and len(gone.tails) > 1:
                dying[:0] = [gone.tails, gone.records]
            elif isinstance(gone, list):
                entries -= len(gone)


def _rest(said: Text, start: int, known: Match) -> bytes:
    """Return the text after `start`. A skipped part comes from the memory."""
    return (piece(known.record, start, said.base) if known.record is not None else b"") + said.text


def _depth(owners: dict[int, Record], keys: list[int]) -> int:
    """Count the leading keys that are owned."""
    if not keys or keys[0] not in owners:
        return 0
    low, high = 1, len(keys)
    if keys[-1] in owners:
        return high
    while low < high:  # the first `low` are owned; not all of the first `high` are, once it has moved
        middle = (low + high + 1) >> 1
        if keys[middle - 1] in owners:
            low = middle
        else:
            high = middle - 1
    return low


def piece(record: Record, start: int, end: int) -> bytes:
    """Return a stretch of a record's text, or the existing part of it."""
    first = record.start
    if start >= first:
        return record.own[start - first : end - first]
    parts: list[bytes] = []
    at: Record | None = record
    while at is not None and start < end:
        if end > at.start:
            parts.append(at.own[max(start - at.start, 0) : end - at.start])
            end = at.start
        at = at.parent
    parts.reverse()
    return b"".join(parts)


def common(one: bytes, other: bytes) -> int:
    """Count the bytes that two short texts have in common at their beginning."""
    at, end = 0, min(len(one), len(other))
    while at < end:
        left, right = one[at : at + COMMON_BYTES], other[at : at + COMMON_BYTES]
        if left != right:
            differing = _number(left, "little") ^ _number(right, "little")
            if not differing:  # one continues with zeros
                return end
            return min(end, at + (((differing & -differing).bit_length() - 1) >> 3))
        at += COMMON_BYTES
    return end
