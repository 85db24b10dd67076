"""Marks by which a prompt is recognised if its beginning has changed: hashes of its messages, and of lines of its
template.

A message is an anchor: another prompt with the same words in it most likely belongs to the same conversation. Templates
have no messages of their own, and change in the middle of a text. For them the longest lines are used. Two texts that
have most lines in common most likely have one of these in common, at any place. Finding the longest lines takes a
fraction of the time of hashing all of them.

Hashes are seeded with the root of the prompt's chain, so that prompts of different identities never match. The marks of
`prefixes` have another seed, since they serve to find the same text under another identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest

from xxhash import xxh3_64_intdigest

from router.core.prompts.canonical import RS

USER = RS + b"user\x1f"
ASSISTANT = RS + b"assistant\x1f"
USER_MESSAGE_WEIGHT = 2  # weight of a message that no model wrote: one such message identifies a conversation
MESSAGE_BYTES_MIN = 32  # a shorter message may be common to many conversations
MESSAGES_KEPT_MAX = 4  # messages that are kept of a prompt's new part
MESSAGES_ASKED_MAX = 32
LINE_BYTES_MIN = 24
LINES_KEPT_MAX = 4
PARAGRAPH_BYTES = 1 << 10  # a longer line is cut at its full stops
SKETCHES_MAX = 256  # consecutive messages without a line of an earlier one, after which most are skipped
SKETCHED_SHARE = 8  # 1 in this number of the next messages is examined
PREFIX_BYTES_MIN = 512  # shortest prefix that gets a mark, in any prompt; each next one is twice as long

_TOOL = b'{"type":"function"'  # begins each tool; they stand in one line


class FingerprintSampling:
    """Sampling of users' long messages. A message is examined line by line, which takes longer than all other work. If
    none of many messages had a line of an earlier one, as without retrieval, only some are examined."""

    def __init__(self) -> None:
        self._left = SKETCHES_MAX
        self._passed = 0

    @property
    def on(self) -> bool:
        """True if every message is examined."""
        return self._left > 0

    def should_sample(self) -> bool:
        """True if one more message should be examined."""
        if self._left > 0:
            self._left -= 1
            return True
        self._passed += 1
        return self._passed % SKETCHED_SHARE == 0

    def on_match(self) -> None:
        """Examine every message again: one had a line of an earlier message."""
        self._left = SKETCHES_MAX


def messages(text: bytes, low: int, seed: int, messages_max: int) -> list[int]:
    """Return marks of the last messages that begin at `low` or after it, last first."""
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


def compute_lookup_marks(text: bytes, low: int, seed: int) -> dict[int, int]:
    """Return marks of the last messages from `low` on, with the weight of each, last first. Messages of models have a
    lower weight, as they often have the same text."""
    made: dict[int, int] = {}
    end = len(text)
    for _ in range(MESSAGES_ASKED_MAX):
        at = text.rfind(RS, low, end)
        if at < 0:
            break
        if end - at > MESSAGE_BYTES_MIN:
            made[xxh3_64_intdigest(text[at:end], seed)] = 1 if text.startswith(ASSISTANT, at) else USER_MESSAGE_WEIGHT
        end = at
    return made


def speaker(marks: Mapping[int, int], said: Callable[[int], int]) -> tuple[int, bool]:
    """Return the conversation with most of these marks, 0 if no mark is decisive; and True if only one message matched,
    which may be a task that is given to many conversations."""
    votes: dict[int, int] = {}
    told = 0
    for mark, worth in marks.items():
        if who := said(mark):
            votes[who] = votes.get(who, 0) + worth
            told += 1
    most = max(votes, key=votes.__getitem__, default=0)
    return (most if most and votes[most] >= USER_MESSAGE_WEIGHT else 0), told == 1


def last(text: bytes, low: int, seed: int) -> list[int]:
    """Return the mark of the last message that begins at `low` or after it and is long enough to be specific, if
    any."""
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
    """Return marks of its longest lines."""
    longest = nlargest(LINES_KEPT_MAX, text.split(b"\n"), len)
    return [xxh3_64_intdigest(line, seed) for line in longest if len(line) >= LINE_BYTES_MIN]


def paragraphs(system: bytes) -> list[bytes]:
    """Return the longest lines of a system prompt, longest first. If it has a very long line, return the longest
    sentences: a prompt that is written in one line has no other line that stays the same."""
    longest = nlargest(LINES_KEPT_MAX, system.split(b"\n"), len)
    if len(longest[0]) > PARAGRAPH_BYTES:
        longest = nlargest(LINES_KEPT_MAX, system.replace(b". ", b"\n").split(b"\n"), len)
    return [line for line in longest if len(line) >= LINE_BYTES_MIN]


def system(text: bytes, seed: int) -> list[int]:
    """Return marks of the longest lines of a system prompt."""
    return [xxh3_64_intdigest(line, seed) for line in paragraphs(text)]


def tools(text: bytes, seed: int) -> list[int]:
    """Return marks of the longest tools in a prompt's head."""
    return lines(text.replace(_TOOL, b"\n"), seed)


def prefixes(text: bytes, seed: int) -> list[int]:
    """Return marks of its first 512 bytes, 1024, and so on, shortest first."""
    made: list[int] = []
    start, end, mark = 0, PREFIX_BYTES_MIN, seed
    view = memoryview(text)
    while end <= len(text):
        made.append(mark := xxh3_64_intdigest(view[start:end], mark))
        start, end = end, end * 2
    return made


def most(conversations: Iterable[int]) -> int:
    """Return the conversation that is named most often, the first of several. 0 if none is named."""
    votes: dict[int, int] = {}
    for each in conversations:
        if each:
            votes[each] = votes.get(each, 0) + 1
    return max(votes, key=votes.__getitem__) if votes else 0
