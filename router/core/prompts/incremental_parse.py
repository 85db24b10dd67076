"""Index of body prefixes that were read before. Of the next turn, only the new part is read.

An agent sends its whole conversation with each turn. Most of such a body is byte for byte the body of the previous
turn, so it need not be decoded, written and hashed again. A body is hashed in cells of 8 KB. Each cell is seeded with
the cell before it. This runs at 20 GB/s; a scan of JSON for the end of a string takes five times as long. The key of a
cell stands for all bytes up to the end of the cell, and leads to the last message that ended by then. The end of a
message in JSON does not depend on later bytes, so a body with the same cells has the same messages up to that point.

The rest of the body is appended to the body's head and to a stand-in for the known messages, and is decoded as a body.
Anything that the parser would make of the whole body (the model after the messages, a field twice) it still makes of
this shorter body. The stand-in is a byte that occurs nowhere in the body. If it comes out first in the messages that
count, the parser took no other list for the messages.

If token ids are made too, the decoded messages are kept with their prefixes, because a template is rendered with all
messages of a conversation.

A match is exact except for collisions of a 64-bit hash with a secret seed. An unusual body (messages twice, messages
below the top level, malformed JSON) is read as if no prefix were known. This module is not thread-safe: each thread
that reads bodies has its own `BodyPrefixCache`, and hashes the prompts that it read with `chain_of`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Raw
from xxhash import xxh3_64_intdigest

from router.core.prompts.canonical import Chat
from router.core.types.requests import DecodedMessages, Heading, MessagePrefix, Prompt

CELL_BYTES = 8 << 10
CELLS_MIN = 4  # a shorter body is read in the time that the lookup and its update take
HEAD_BYTES_MAX = 256 << 10  # bytes of a body before its first message
SHARE_MIN = 4  # a known prefix is used if it is at least this fraction of the body, a quarter
# Size of remembered state in bytes, as tracemalloc measures it: a message that a cell leads to, a cell, its keys.
MARK_BYTES, CELL_ENTRY_BYTES, CELL_KEYS_BYTES = 1_500, 120, 800
# Size of a decoded message: its own, each object or array, each value in these, a character, a list entry.
MESSAGE_BYTES, OBJECT_BYTES, VALUE_BYTES, CHARACTER_BYTES_MAX, LIST_ENTRY_BYTES = 500, 300, 100, 4, 8
# Stands for the known messages. A body that contains this byte is never put together, so no other list begins with it.
_ODD_BYTE = b"\x7f"
_KNOWN = b'"\x7f"'
_ESCAPE = b"\\u"  # begins the escape of a character that may be outside ASCII
# Values of a cell that leads to no message. _MET: the cell was seen, and its body read whole. _BARREN: the cell ends
# within the first message.
_MET, _BARREN = "met", "barren"
_BETWEEN = b" \t\r\n,"
_MESSAGES = re.compile(rb'"messages"[ \t\r\n]*:[ \t\r\n]*\[')


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """End of a message: its offset in the body, and the prefix of messages that ends there."""

    at: int
    head: bytes  # the body up to and including the bracket before the first message
    beginning: MessagePrefix | None  # None: the mark is at the bracket that ends `head`
    # Brackets and commas of the messages, including those in strings.
    brackets: int = 0
    commas: int = 0


@dataclass(slots=True)
class KnownPrefix:
    """Known prefix of a body, and the rest of it to read."""

    cells: list[int]
    known: int  # number of leading cells that are known
    mark: MessageEnd
    rest: bytes  # a body: the head, a string instead of the known messages, and the other messages

    def has_at_most(self, parts_max: int, values_max: int) -> bool:
        """True if the body certainly has at most this number of parts and values, as `excess` counts them. False if it
        may have more."""
        mark, rest = self.mark, self.rest
        brackets = mark.brackets + rest.count(b"{") + rest.count(b"[")
        return brackets <= parts_max and mark.commas + rest.count(b",") <= values_max

    def copy_known_messages(self) -> DecodedMessages:
        """Return the known decoded messages in a list that can be extended. The list is empty if none is known."""
        beginning = self.mark.beginning
        return beginning.said.copy() if beginning is not None and beginning.said is not None else DecodedMessages([])

    def new(self, messages: Sequence[Raw]) -> Sequence[Raw] | None:
        """Return the messages that were not known, of all messages decoded from `rest`. None if `rest` was decoded to
        another list, because another field of this name follows."""
        return messages[1:] if messages and bytes(messages[0]) == _KNOWN else None


class BodyPrefixCache:
    """A bounded index of prefixes. For one thread."""

    def __init__(self, *, bytes_max: int, seed: int, cell_bytes: int = CELL_BYTES) -> None:
        """`seed`: 64 random bits, so that no client can make bodies that collide."""
        self._cell_bytes = cell_bytes
        self._bytes_max = bytes_max
        self._seed = self._first_seed = seed
        # Two generations: a used entry moves to the young one. The old one is dropped when the young one is full.
        self._young: dict[int, MessageEnd | str] = {}
        self._old: dict[int, MessageEnd | str] = {}
        self._bytes = 0
        self._heads: dict[int, Heading] = {}
        self._looked: tuple[bytes, bytes, KnownPrefix | None] | None = None  # arguments and result of the last `look`

    def per_tenant(self, whose: bytes) -> None:
        """Find only prefixes that were read for this name, until the next call. Otherwise the time in which a body is
        read would reveal the requests of other tenants. b"" is shared by all requests that need no isolation."""
        self._seed = xxh3_64_intdigest(whose, self._first_seed) if whose else self._first_seed

    def look(self, body: bytes, dialect: bytes) -> KnownPrefix | None:
        """Return the result that `find` will return next for the same body."""
        place = self.find(body, dialect)
        self._looked = (body, dialect, place)
        return place

    def find(self, body: bytes, dialect: bytes) -> KnownPrefix | None:
        """Return the longest known prefix of a body. None if reading the whole body is cheaper, because it shares
        little with any other body or a lookup did not pay off before. None also if the start of its messages cannot be
        determined."""
        looked, self._looked = self._looked, None
        if looked is not None and looked[0] is body and looked[1] == dialect:
            return looked[2]
        if len(body) < CELLS_MIN * self._cell_bytes:
            return None
        cells = self._cells(body, dialect)
        known = deepest = next((n for n in range(len(cells), 0, -1) if self._get_cell(cells[n - 1]) is not None), 0)
        mark = self._get_cell(cells[known - 1]) if known else None
        met = mark is _MET
        while known and not isinstance(mark, MessageEnd):
            known -= 1
            mark = self._get_cell(cells[known - 1]) if known else None
        if isinstance(mark, MessageEnd) and mark.at * SHARE_MIN >= len(body):
            return _place(body, cells, known, mark)
        if not met or deepest * self._cell_bytes * SHARE_MIN < len(body):
            self._young.update(dict.fromkeys(cells[deepest:], _MET))
            self.spend((len(cells) - deepest) * CELL_ENTRY_BYTES)
            return None
        if isinstance(mark, MessageEnd):
            return _place(body, cells, known, mark)
        head = _head(body)
        return _place(body, cells, 0, MessageEnd(len(head), head, None)) if head else None

    def resume(
        self,
        chat: Chat,
        place: KnownPrefix,
        body: bytes,
        messages: Sequence[Raw],
        write: Callable[[Raw], Any],
        read_whole: Callable[[], Prompt | None],
        said: DecodedMessages | None = None,
    ) -> Prompt:
        """Return the prompt of a body of which all messages except these are known. Each of these messages is written
        to `chat` and remembered.

        - `write`: returns the decoded message, which is appended to `said` if decoded messages are kept.
        - `read_whole`: reads the body as if no prefix were known, if the prompt's text is needed.
        """
        ends: list[tuple[int, MessagePrefix]] = []
        held = said.held_bytes if said is not None else 0
        for message, end in zip(messages, _ends_of(body, place.mark.at, messages), strict=True):
            decoded, beginning = write(message), chat.get_beginning()
            if said is not None:
                said.add(decoded, _decoded_bytes(decoded, bytes(message)))
                beginning.said = DecodedMessages(said.messages, said.count, said.held_bytes)
            ends.append((end, beginning))
        if said is not None:
            self.spend(said.held_bytes - held + LIST_ENTRY_BYTES * said.count)

        def whole() -> Prompt | None:
            self.spend(len(body) // 8)
            return read_whole()

        return chat.build_linked_prompt(self.learn(place, body, ends), whole)

    def learn(self, place: KnownPrefix, body: bytes, ends: Sequence[tuple[int, MessagePrefix]]) -> list[MessagePrefix]:
        """Remember these messages, each by its end in the body, in order. Returns those that can be found again."""
        made: list[MessagePrefix] = []
        mark: MessageEnd | str = place.mark if place.mark.beginning else _BARREN
        at, counted = 0, place.mark
        for index in range(place.known, len(place.cells)):
            before, upto = at, (index + 1) * self._cell_bytes
            while at < len(ends) and ends[at][0] <= upto:
                at += 1
            if at > before:
                end, beginning = ends[at - 1]
                made.append(beginning)
                mark = counted = _build_message_end(body, counted, end, beginning)
            self._young[place.cells[index]] = mark
        cells = len(place.cells) - place.known
        heads = 0 if place.mark.beginning else len(place.mark.head)
        self.spend(len(made) * MARK_BYTES + cells * (CELL_ENTRY_BYTES + CELL_KEYS_BYTES) + heads + len(body) // 64)
        return made

    def spend(self, size: int) -> None:
        """Add to the number of bytes in use."""
        self._bytes += size
        if self._bytes > self._bytes_max // 2:
            self._old, self._young, self._bytes = self._young, {}, 0
            self._heads.clear()

    def get_or_render(self, parts: Sequence[Raw], make: Callable[[], Heading]) -> Heading:
        """Return the result of `make` for these parts of a body, cached if they are long. Tools come with every turn,
        and are long."""
        if sum(map(len, parts)) < CELL_BYTES:
            return make()
        key = self._seed
        for part in parts:
            key = xxh3_64_intdigest(bytes(part), key + len(part) & _MASK)
        found = self._heads.get(key)
        if found is None:
            found = self._heads[key] = make()
            self.spend(len(found[0]) + CELL_ENTRY_BYTES)
        return found

    def _cells(self, body: bytes, dialect: bytes) -> list[int]:
        key, view, size = xxh3_64_intdigest(dialect, self._seed), memoryview(body), self._cell_bytes
        starts = range(0, len(body) - size + 1, size)
        return [key := xxh3_64_intdigest(view[start : start + size], key) for start in starts]

    def _get_cell(self, cell: int) -> MessageEnd | str | None:
        found = self._young.get(cell)
        if found is None:
            found = self._old.get(cell)
            if found is not None:
                self._young[cell] = found
                self.spend(CELL_ENTRY_BYTES + (_count_held_bytes(found) if isinstance(found, MessageEnd) else 0))
        return found


_MASK = (1 << 64) - 1


def _decoded_bytes(message: object, raw: bytes) -> int:
    """Return the memory that a message decoded from `raw` takes. It is an upper bound, and close if all values are
    strings."""
    if isinstance(message, dict) and all(isinstance(value, str) for value in message.values()):
        sizes: list[int] = [value.__sizeof__() for value in message.values()]
        return MESSAGE_BYTES + sum(sizes)
    characters = len(raw) * (1 if raw.isascii() and _ESCAPE not in raw else CHARACTER_BYTES_MAX)
    objects = raw.count(b"{") + raw.count(b"[")
    return MESSAGE_BYTES + characters + OBJECT_BYTES * objects + VALUE_BYTES * raw.count(b",")


def _count_held_bytes(mark: MessageEnd) -> int:
    """Return the bytes that a mark keeps in memory."""
    said = mark.beginning.said if mark.beginning is not None else None
    more = said.held_bytes + LIST_ENTRY_BYTES * said.count if said is not None else 0
    return MARK_BYTES + len(mark.head) + mark.at // 64 + more


def _build_message_end(body: bytes, before: MessageEnd, end: int, beginning: MessagePrefix) -> MessageEnd:
    """Return the mark at this end of a message, given an earlier mark of the body."""
    at = before.at
    brackets = before.brackets + body.count(b"{", at, end) + body.count(b"[", at, end)
    return MessageEnd(end, before.head, beginning, brackets, before.commas + body.count(b",", at, end))


def _ends_of(body: bytes, at: int, messages: Sequence[Raw]) -> list[int]:
    """Return the offset after each of these messages, which follow each other in the body from `at` on."""
    ends = []
    for message in messages:
        while body[at] in _BETWEEN:
            at += 1
        at += len(message)
        ends.append(at)
    return ends


def _place(body: bytes, cells: list[int], known: int, mark: MessageEnd) -> KnownPrefix | None:
    rest, head = body[mark.at :], mark.head
    if _ODD_BYTE in rest or _ODD_BYTE in head:
        return None
    return KnownPrefix(cells, known, mark, b"".join((head, _KNOWN if mark.beginning else _KNOWN + b",", rest)))


def _head(body: bytes) -> bytes:
    """Return the body up to the bracket after which its messages seem to begin. `KnownPrefix.new` verifies this. Empty
    if the body has no such bracket."""
    found = _MESSAGES.search(body, 0, HEAD_BYTES_MAX)
    return body[: found.end()] if found else b""
