"""Message of one router to all others, or its complete state, as bytes in the store.

It begins with a head of fixed size: the version, a number of the router's process, the number of the message, and the
router's own clock. By the head a router recognizes its own messages, those that it has already read, and those of
another release without parsing them. Then msgpack follows. It has the sender's name, the shared data that is not the
core's (rates, evidence), and the core's own message unchanged.

A received message may be old, duplicated, of another release or forged. An unreadable message raises BadFrame, and no
other exception.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 3
FRAME_BYTES_MAX = 5 << 20  # bytes of a message; a longer one is neither sent nor read
TENANTS_MAX = 256  # tenants with rates in a message
DEAD_MAX = 256  # replicas in a message that were found dead
REPLICAS_MAX, NUMBER_BYTES = 1_024, 8  # replicas in a message, and bytes of each one's number
NAME_CHARS_MAX = 253
WORD_CHARS_MAX = 1_024  # characters of any other string in a received message
Word = Annotated[str, Meta(max_length=WORD_CHARS_MAX)]
_HEAD = struct.Struct("!BQQd")
HEAD_BYTES = _HEAD.size


class BadFrame(ValueError):
    """A message that no router of this release can have sent."""


class TenantUsage(msgspec.Struct, array_like=True, frozen=True):
    """Usage of a tenant's rates at one router since its start, and its estimate of the rest for all routers together;
    of requests and of tokens. None: the tenant has no such rate."""

    tenant: Word
    requests: float
    tokens: float
    requests_left: float | None = None
    tokens_left: float | None = None


class StateMark(msgspec.Struct, array_like=True, frozen=True):
    """Place of a state among the messages of its router: it includes those up to this id."""

    ms: Annotated[int, Meta(ge=0)]
    number: Annotated[int, Meta(ge=0)]
    store_s: float
    """The store's clock when the state was encoded."""


class PeerFrame(msgspec.Struct, array_like=True, kw_only=True):
    """One message or state, after its head."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    leaving: bool = False
    """True if the router ends, and this is its last message."""
    spent: Annotated[list[TenantUsage], Meta(max_length=TENANTS_MAX)] = msgspec.field(default_factory=list)
    dead: Annotated[list[Word], Meta(max_length=DEAD_MAX)] = msgspec.field(default_factory=list)
    """Replicas that this router has found dead by its own requests."""
    core: bytes = b""
    """The core's message or state; empty if it has none."""
    asks: Word = ""
    """Name of the router from which this one requests its snapshot."""
    replicas: Annotated[bytes, Meta(max_length=REPLICAS_MAX * NUMBER_BYTES)] = b""
    """Numbers of the router's replicas (peers.py), little-endian; in some messages only, b"" in the others."""
    state: StateMark | None = None
    """None in a message."""


class FrameHead(msgspec.Struct, frozen=True):
    """Head of a message: its sender, the number of messages of that process up to this one, and the time in seconds by
    the sender's clock. The head of a state is that of the last message that it includes."""

    origin: int
    seq: int
    at_s: float


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PeerFrame).decode


def pack_frame(frame: PeerFrame, origin: int, seq: int, now_s: float) -> bytes:
    """Encode a message."""
    return _HEAD.pack(VERSION, origin, seq, now_s) + _encode(frame)


def head_of(message: bytes) -> FrameHead | None:
    """Return the head of a message; None for one of another release. Raises BadFrame."""
    if not message:
        raise BadFrame("an empty message")
    if message[0] != VERSION:
        return None
    if not HEAD_BYTES < len(message) <= FRAME_BYTES_MAX:
        raise BadFrame(f"a message of {len(message)} bytes")
    _, origin, seq, at_s = _HEAD.unpack_from(message)
    if not math.isfinite(at_s):
        raise BadFrame("an invalid time")
    return FrameHead(origin, seq, at_s)


def frame_of(message: bytes) -> PeerFrame:
    """Decode the part after the head. Raises BadFrame."""
    try:
        frame = _decode(memoryview(message)[HEAD_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a message of a router: {error}") from error
    if not frame.name.isprintable() or (frame.spent and not _finite(frame.spent)):
        raise BadFrame("invalid names or numbers")
    if len(frame.spent) > 1 and len({each.tenant for each in frame.spent}) < len(frame.spent):
        raise BadFrame("a duplicate tenant")  # the limit of a tenant's usage applies to each entry
    if len(frame.replicas) % NUMBER_BYTES:
        raise BadFrame("invalid numbers of replicas")
    if frame.state is not None and not math.isfinite(frame.state.store_s):
        raise BadFrame("an invalid time of a state")
    return frame


def _finite(spent: list[TenantUsage]) -> bool:
    return all(
        math.isfinite(number or 0.0)
        for each in spent
        for number in (each.requests, each.tokens, each.requests_left, each.tokens_left)
    )
