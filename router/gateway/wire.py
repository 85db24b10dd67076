"""Protobuf's wire format (https://protobuf.dev/programming-guides/encoding/), as far as answers to Envoy need it.

An answer is a few headers in messages within messages. Library objects for all of these take several times as long as
putting their bytes together, and copy a request's body twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHORT = tuple(bytes((size,)) for size in range(128))


def tag(number: int) -> bytes:
    """What begins field `number`, below 16, of a message where it is a message, text or bytes."""
    return bytes((number << 3 | 2,))


def flag(number: int, value: int = 1) -> bytes:
    """Field `number`, below 16, whose value is True or a number below 128."""
    return bytes((number << 3, value))


def varint(number: int) -> bytes:
    """A number, at least 0, in groups of seven bits, the lowest first."""
    if number < 128:
        return _SHORT[number]
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def field(begins: bytes, value: bytes) -> bytes:
    """One field: its tag, the length of its value in bytes, and the value."""
    return b"".join((begins, varint(len(value)), value))


def within(tags: Sequence[bytes], pieces: Iterable[bytes], behind: bytes = b"") -> bytes:
    """The value that these pieces make together, in messages within messages: `tags` are those of their fields, the
    outermost first. `behind` are more fields beside the outermost. The pieces are copied once."""
    parts = list(pieces)
    size, heads = 0, list[bytes]()
    for piece in parts:
        size += len(piece)
    for begins in reversed(tags):
        head = begins + varint(size)
        size += len(head)
        heads.append(head)
    heads.reverse()
    return b"".join([*heads, *parts, behind])
