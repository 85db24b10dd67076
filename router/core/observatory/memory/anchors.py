"""What a prompt is recognised by where its beginning has changed: hashes of its messages, and of lines of its template.

A message is an anchor: another prompt with the same words in it is most likely of the same conversation. Templates
have no messages of their own, and change in the middle of a text; of theirs the longest lines are taken. Two texts
that have most lines in common have most likely one of these in common, wherever it stands, and finding the longest
takes a fraction of the time that hashing all of them does.

Hashes are seeded with the root of the prompt's chain, so that identities never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest

from xxhash import xxh3_64_intdigest

from router.core.prompts.canonical import RS

USER = RS + b"user\x1f"
ASSISTANT = RS + b"assistant\x1f"
TELLING = 2  # weight of a message that no model wrote: one such tells whose prompt it is
MESSAGE_BYTES_MIN = 32  # a shorter message may be anybody's
MESSAGES_KEPT_MAX = 4  # messages that are kept of a prompt's new part
MESSAGES_ASKED_MAX = 32
LINE_BYTES_MIN = 24
LINES_KEPT_MAX = 4
PARAGRAPH_BYTES = 1 << 10  # a longer line is cut at its full stops
SKETCHES_MAX = 256  # messages in a row without a line of an earlier one, after which most are skipped
SKETCHED_SHARE = 8  # 1 in so many of the next messages is looked at
PREFIX_BYTES_MIN = 512  # shortest prefix that gets a mark, whoever's text it is; each next one is twice as long

_TOOL = b'{"type":"function"'  # begins each tool; they stand in one line


class Sketches:
    """Whether users' long messages are worth looking at line by line, which takes longer than all else. Where none of
    many messages had a line of an earlier one, as without retrieval, only some are looked at."""

    def __init__(self) -> None:
        self._left = SKETCHES_MAX
        self._passed = 0

    @property
    def on(self) -> bool:
        """Whether every message is looked at."""
        return self._left > 0

    def wanted(self) -> bool:
        """Whether to look at one more message."""
        if self._left > 0:
            self._left -= 1
            return True
        self._passed += 1
        return self._passed % SKETCHED_SHARE == 0

    def found(self) -> None:
        """Look at every message again: one had a line of an earlier message."""
        self._left = SKETCHES_MAX


def messages(text: bytes, low: int, seed: int, messages_max: int) -> list[int]:
    """Marks of the last messages that begin at `low` or behind it, last first."""
    made: list[int] = []
    end = len(text)
    for _ in range(messages_max):
        at = text.rfind(RS, low, end)
        if at < 0:
            break
        if end - at > MESSAGE_BYTES_MIN:
            made.append(xxh3_64_intdigest(text[at:end], seed))
        end = at
    return made


def asked(text: bytes, low: int, seed: int) -> dict[int, int]:
    """Marks of the last messages from `low` on, with what each is worth, last first: what models say is worth less,
    as they often say the same."""
    made: dict[int, int] = {}
    end = len(text)
    for _ in range(MESSAGES_ASKED_MAX):
        at = text.rfind(RS, low, end)
        if at < 0:
            break
        if end - at > MESSAGE_BYTES_MIN:
            made[xxh3_64_intdigest(text[at:end], seed)] = 1 if text.startswith(ASSISTANT, at) else TELLING
        end = at
    return made


def speaker(marks: Mapping[int, int], said: Callable[[int], int]) -> tuple[int, bool]:
    """The conversation that said most of it, 0 where none said anything that tells; and whether one message alone told
    so, which may be a task that is given to many."""
    votes: dict[int, int] = {}
    told = 0
    for mark, worth in marks.items():
        if who := said(mark):
            votes[who] = votes.get(who, 0) + worth
            told += 1
    most = max(votes, key=votes.__getitem__, default=0)
    return (most if most and votes[most] >= TELLING else 0), told == 1


def last(text: bytes, low: int, seed: int) -> list[int]:
    """The mark of the last message that begins at `low` or behind it and is not anybody's, if there is one."""
    end = len(text)
    for _ in range(MESSAGES_KEPT_MAX):
        at = text.rfind(RS, low, end)
        if at < 0:
            break
        if end - at > MESSAGE_BYTES_MIN:
            return [xxh3_64_intdigest(text[at:end], seed)]
        end = at
    return []


def lines(text: bytes, seed: int) -> list[int]:
    """Marks of its longest lines."""
    longest = nlargest(LINES_KEPT_MAX, text.split(b"\n"), len)
    return [xxh3_64_intdigest(line, seed) for line in longest if len(line) >= LINE_BYTES_MIN]


def paragraphs(system: bytes) -> list[bytes]:
    """The longest lines of a system prompt, longest first; of one with a very long line, the longest sentences: a
    prompt that is written in one line has no other line that stays the same."""
    longest = nlargest(LINES_KEPT_MAX, system.split(b"\n"), len)
    if len(longest[0]) > PARAGRAPH_BYTES:
        longest = nlargest(LINES_KEPT_MAX, system.replace(b". ", b"\n").split(b"\n"), len)
    return [line for line in longest if len(line) >= LINE_BYTES_MIN]


def system(text: bytes, seed: int) -> list[int]:
    """Marks of the longest lines of a system prompt."""
    return [xxh3_64_intdigest(line, seed) for line in paragraphs(text)]


def tools(text: bytes, seed: int) -> list[int]:
    """Marks of the longest tools, of a prompt's head."""
    return lines(text.replace(_TOOL, b"\n"), seed)


def prefixes(text: bytes, seed: int) -> list[int]:
    """Marks of its first 512 bytes, 1024, and so on, shortest first."""
    made: list[int] = []
    start, end, mark = 0, PREFIX_BYTES_MIN, seed
    view = memoryview(text)
    while end <= len(text):
        made.append(mark := xxh3_64_intdigest(view[start:end], mark))
        start, end = end, end * 2
    return made


def most(conversations: Iterable[int]) -> int:
    """The one that is named most often, the first of several; 0 where none is."""
    votes: dict[int, int] = {}
    for each in conversations:
        if each:
            votes[each] = votes.get(each, 0) + 1
    return max(votes, key=votes.__getitem__) if votes else 0
