"""Message of one router to all others, as bytes on the channel.

It begins with a head of fixed size: the version, a number of the router's process, and its own clock. By the head a
router recognizes its own messages and those of another release without parsing them. Then msgpack follows. It has the
sender's name, the shared data that is not the core's (rates, evidence, owners), and the core's own message unchanged.

A received message may be old, duplicated, of another release or forged. An unreadable message raises BadFrame, and no
other exception.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 1
FRAME_BYTES_MAX = 5 << 20  # bytes of a message; a longer one is neither sent nor read
OWNERS_MAX = 512  # owners of stored responses in a message
TENANTS_MAX = 256  # tenants with rates in a message
DEAD_MAX = 256  # replicas in a message that were found dead
REPLICAS_MAX, NUMBER_BYTES = 1_024, 8  # replicas in a message, and bytes of each one's number
NAME_CHARS_MAX = 253
WORD_CHARS_MAX = 1_024  # characters of any other string in a received message
Word = Annotated[str, Meta(max_length=WORD_CHARS_MAX)]
_HEAD = struct.Struct("!BQd")
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


class PeerFrame(msgspec.Struct, array_like=True, kw_only=True):
    """One message, after its head."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    begun: bool = False
    """True if the router has just begun to listen, so that others should publish everything at once."""
    leaving: bool = False
    """True if the router ends, and this is its last message."""
    spent: Annotated[list[TenantUsage], Meta(max_length=TENANTS_MAX)] = msgspec.field(default_factory=list)
    dead: Annotated[list[Word], Meta(max_length=DEAD_MAX)] = msgspec.field(default_factory=list)
    """Replicas that this router has found dead by its own requests."""
    owners: Annotated[list[tuple[Word, Word, Word]], Meta(max_length=OWNERS_MAX)] = msgspec.field(default_factory=list)
    """Owners of stored responses, each as `ResponseOwnerEntry` has it."""
    core: bytes = b""
    """The core's message; empty if it has none."""
    asks: tuple[str, int] | None = None
    """Name of the router from which this one requests its state, and the number of parcels that it has taken."""
    replicas: Annotated[bytes, Meta(max_length=REPLICAS_MAX * NUMBER_BYTES)] = b""
    """Numbers of the router's replicas (peers.py), little-endian; in some messages only, b"" in the others."""


class FrameHead(msgspec.Struct, frozen=True):
    """Head of a message: its sender, and the time in seconds by the sender's clock."""

    origin: int
    at_s: float


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PeerFrame).decode


def pack_frame(frame: PeerFrame, origin: int, now_s: float) -> bytes:
    """Encode a message."""
    return _HEAD.pack(VERSION, origin, now_s) + _encode(frame)


def head_of(message: bytes) -> FrameHead | None:
    """Return the head of a message; None for one of another release. Raises BadFrame."""
    if not message:
        raise BadFrame("an empty message")
    if message[0] != VERSION:
        return None
    if not HEAD_BYTES < len(message) <= FRAME_BYTES_MAX:
        raise BadFrame(f"a message of {len(message)} bytes")
    _, origin, at_s = _HEAD.unpack_from(message)
    if not math.isfinite(at_s):
        raise BadFrame("an invalid time")
    return FrameHead(origin, at_s)


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
    return frame


def _finite(spent: list[TenantUsage]) -> bool:
    return all(
        math.isfinite(number or 0.0)
        for each in spent
        for number in (each.requests, each.tokens, each.requests_left, each.tokens_left)
    )
