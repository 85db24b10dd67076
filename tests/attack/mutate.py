"""Changes of bytes, drawn at random: what stands in for a fuzzer where none is installed, and in the suite."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

CHANGES_MAX = 6  # changes of one input at most; most inputs get one or two
REPEATS = (2, 3, 10, 100, 1_000)
# Numbers on whose edges parsers go wrong, as text and as bytes of both orders.
NUMBERS = (0, 1, -1, 7, 127, 128, 255, 256, 32_767, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64)
WORDS = (
    *(b"%d" % number for number in NUMBERS),
    *((number % 2**bits).to_bytes(bits // 8, "little") for number in NUMBERS for bits in (16, 32)),
    *((number % 2**bits).to_bytes(bits // 8, "big") for number in NUMBERS for bits in (16, 32, 64)),
    b"\x00", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xf4\x90\x80\x80", b"\r", b"\n", b"\r\n",
    b"\n\n", b"null", b"true", b"NaN", b"Infinity", b"1e999", b"-0", b"0.1", b'"', b"\\u0000", b"\\ud800", b"[", b"]",
    b"{", b"}", b"[" * 600, b'{"a":' * 600, b"\x91" * 600,
)  # fmt: skip


def mutated(choose: random.Random, pool: Sequence[bytes], words: Sequence[bytes], bytes_max: int) -> bytes:
    """One input of the pool with one to CHANGES_MAX changes, cut at `bytes_max`. `words` are a target's own."""
    data = bytearray(choose.choice(pool))
    for _ in range(1 + min(CHANGES_MAX - 1, int(choose.expovariate(1.0)))):
        choose.choice(_CHANGES)(choose, data, pool, words)
    return bytes(data[:bytes_max])


def _span(choose: random.Random, size: int) -> tuple[int, int]:
    """Beginning and end of a piece of so many bytes; short ones are likelier."""
    start = choose.randrange(size + 1)
    return start, min(size, start + choose.choice((1, 1, 2, 4, 8, 16, 64, size)))


def _flip(choose: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    if data:
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)


def _set(choose: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    if data:
        data[choose.randrange(len(data))] = choose.randrange(256)


def _cut(choose: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    start, end = _span(choose, len(data))
    del data[start:end]


def _end(choose: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    del data[choose.randrange(len(data) + 1) :]


def _splice(choose: random.Random, data: bytearray, pool: Sequence[bytes], _: Sequence[bytes]) -> None:
    other = choose.choice(pool)
    start, end = _span(choose, len(other))
    at, until = _span(choose, len(data))
    data[at : until if choose.random() < 0.5 else at] = other[start:end]


def _repeat(choose: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    start, end = _span(choose, len(data))
    data[start:end] = data[start:end] * choose.choice(REPEATS)


def _word(choose: random.Random, data: bytearray, _: Sequence[bytes], words: Sequence[bytes]) -> None:
    word = choose.choice(words if words and choose.random() < 0.7 else WORDS)
    at, until = _span(choose, len(data))
    data[at : until if choose.random() < 0.5 else at] = word


def _line(choose: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    """Double, drop or move a line."""
    lines = bytes(data).splitlines(keepends=True)
    if lines:
        at, how = choose.randrange(len(lines)), choose.randrange(3)
        line = lines[at] if how == 0 else lines.pop(at)
        if how != 1:
            lines.insert(choose.randrange(len(lines) + 1), line)
        data[:] = b"".join(lines)


_CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes], Sequence[bytes]], None], ...] = (
    _flip, _set, _cut, _end, _splice, _splice, _repeat, _word, _word, _line,
)  # fmt: skip
