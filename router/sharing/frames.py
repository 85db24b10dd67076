"""What one router says to all others at once: the bytes of one message on the channel.

First a head of fixed size, so that a router knows its own messages and those of another release without reading them:
the version, a number of the router's process, and its own clock. Then msgpack: who says it, what is shared besides the
core (rates, evidence, owners), and the core's own message as it is.

Everything that is heard may be old, doubled, of another release or of nobody: what cannot be read is a BadFrame, and
nothing else.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 1
FRAME_BYTES_MAX = 5 << 20  # bytes of a message; a longer one is neither said nor read
OWNERS_MAX = 512  # owners of stored responses in a message
TENANTS_MAX = 256  # tenants whose rates are in a message
DEAD_MAX = 256  # replicas in a message that were found dead
REPLICAS_MAX, NUMBER_BYTES = 1_024, 8  # replicas in a message, and bytes of each one's number
NAME_CHARS_MAX = 253
WORD_CHARS_MAX = 1_024  # characters of any other word that is heard
Word = Annotated[str, Meta(max_length=WORD_CHARS_MAX)]
_HEAD = struct.Struct("!BQd")
HEAD_BYTES = _HEAD.size


class BadFrame(ValueError):
    """A message that no router of this release has said."""


class Spent(msgspec.Struct, array_like=True, frozen=True):
    """What a router has spent of a tenant's rates since it started, and what it believes to be left to all routers
    together; of requests and of tokens. None: there is no such rate."""

    tenant: Word
    requests: float
    tokens: float
    requests_left: float | None = None
    tokens_left: float | None = None


class Frame(msgspec.Struct, array_like=True, kw_only=True):
    """One message, behind its head."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    begun: bool = False
    """Whether the router has just begun to listen, so that others had better say everything at once."""
    leaving: bool = False
    """Whether the router ends, and this is its last message."""
    spent: Annotated[list[Spent], Meta(max_length=TENANTS_MAX)] = msgspec.field(default_factory=list)
    dead: Annotated[list[Word], Meta(max_length=DEAD_MAX)] = msgspec.field(default_factory=list)
    """Replicas that this router has found dead itself."""
    owners: Annotated[list[tuple[Word, Word, Word]], Meta(max_length=OWNERS_MAX)] = msgspec.field(default_factory=list)
    """Of stored responses, each as `Written` has it."""
    core: bytes = b""
    """The core's message; empty where it has nothing to say."""
    asks: tuple[str, int] | None = None
    """Name of the router that this one asks for all that it knows, and how many parcels of that it has taken."""
    replicas: Annotated[bytes, Meta(max_length=REPLICAS_MAX * NUMBER_BYTES)] = b""
    """Numbers of the router's replicas (peers.py), little-endian; in some messages only, b"" in the others."""


class FrameHead(msgspec.Struct, frozen=True):
    """The head of a message: who said it, and when, by the clock of whoever did, in seconds."""

    origin: int
    at_s: float


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def packed(frame: Frame, origin: int, now_s: float) -> bytes:
    """The bytes of a message."""
    return _HEAD.pack(VERSION, origin, now_s) + _encode(frame)


def head_of(message: bytes) -> FrameHead | None:
    """The head of a message; None for one of another release. Raises BadFrame."""
    if not message:
        raise BadFrame("an empty message")
    if message[0] != VERSION:
        return None
    if not HEAD_BYTES < len(message) <= FRAME_BYTES_MAX:
        raise BadFrame(f"a message of {len(message)} bytes")
    _, origin, at_s = _HEAD.unpack_from(message)
    if not math.isfinite(at_s):
        raise BadFrame("a time that is none")
    return FrameHead(origin, at_s)


def frame_of(message: bytes) -> Frame:
    """What is behind the head. Raises BadFrame."""
    try:
        frame = _decode(memoryview(message)[HEAD_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not what routers say: {error}") from error
    if not frame.name.isprintable() or (frame.spent and not _finite(frame.spent)):
        raise BadFrame("words or numbers that are none")
    if len(frame.spent) > 1 and len({each.tenant for each in frame.spent}) < len(frame.spent):
        raise BadFrame("a tenant twice")  # each time is bounded by what a tenant may use
    if len(frame.replicas) % NUMBER_BYTES:
        raise BadFrame("numbers of replicas that are none")
    return frame


def _finite(spent: list[Spent]) -> bool:
    return all(
        math.isfinite(number or 0.0)
        for each in spent
        for number in (each.requests, each.tokens, each.requests_left, each.tokens_left)
    )
