"""Subset of protobuf's wire format (https://protobuf.dev/programming-guides/encoding/) for responses to Envoy.

A response consists of a few headers in nested messages. Library objects for all of these take several times as long as
the concatenation of their bytes, and copy a request's body twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHORT = tuple(bytes((size,)) for size in range(128))


def tag(number: int) -> bytes:
    """Return the tag of field `number`, below 16, which is a message, text or bytes."""
    return bytes((number << 3 | 2,))


def bool_field(number: int, value: int = 1) -> bytes:
    """Return field `number`, below 16, with the value True or a number below 128."""
    return bytes((number << 3, value))


def varint(number: int) -> bytes:
    """Encode a number, at least 0, in groups of seven bits, the lowest first."""
    if number < 128:
        return _SHORT[number]
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def field(begins: bytes, value: bytes) -> bytes:
    """Encode one field: its tag, the length of its value in bytes, and the value."""
    return b"".join((begins, varint(len(value)), value))


def nested_message(tags: Sequence[bytes], pieces: Iterable[bytes], behind: bytes = b"") -> bytes:
    """Encode the pieces as one value in nested messages. `tags` are the tags of their fields, the outermost first.
    `behind` are more fields after the outermost. The pieces are copied once."""
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


def bytes_and_end(message: bytes, number: int) -> tuple[bytes, bool] | None:
    """Return the bytes of field 1 and the flag of field 2 of the message in field `number`, below 16. They are sliced
    out of `message` with one copy. None unless that field occurs once and has no other fields: a full protobuf parser
    is needed then."""
    found: tuple[int, int] | None = None
    at, end = 0, len(message)
    while at < end:
        key, begin, stop = _next(message, at, end)
        if stop < 0:
            return None
        if key >> 3 == number:
            if key & 7 != 2 or found is not None:
                return None
            found = begin, stop
        at = stop
    if found is None:
        return None
    at, end = found
    begins = ends = at
    last = False
    while at < end:
        key, begin, stop = _next(message, at, end)
        if stop < 0 or key not in (1 << 3 | 2, 2 << 3):
            return None
        if key == 2 << 3:
            last = message[begin] != 0 or stop - begin > 1
        else:
            begins, ends = begin, stop
        at = stop
    return message[begins:ends], last


def _next(message: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return the key of the field that begins at `at`, and the start and end of its value. The end is -1 if it is not
    before `end`, or if the field has an unsupported type."""
    key, at = _number(message, at, end)
    kind = key & 7
    if at < 0 or kind not in (0, 2):
        return 0, -1, -1
    size, begin = _number(message, at, end)
    if begin < 0:
        return 0, -1, -1
    if kind == 0:
        return key, at, begin
    return (key, begin, begin + size) if begin + size <= end else (0, -1, -1)


def _number(message: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number of at most 63 bits, and the offset after it; -1 if there is no valid number."""
    value = shift = 0
    while at < end and shift < 63:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, -1
