"""Floods: responses that a hostile engine sends as fast as they are accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadtest.common.answers import LAST_CHUNK, STREAM_HEAD, chunk
from loadtest.faults.upstream import answers

PIECE_BYTES = 64 << 10
_CHAT = answers.APIS["chat"]
_EVENT, _REST_OF_EVENT = _CHAT.token.encode().split(b"%TEXT%")
_END = b"".join(map(chunk, (*_CHAT.finish, *_CHAT.done))) + LAST_CHUNK
_NUMBERS = b"0.0123456789," * (PIECE_BYTES // 13)


@dataclass(frozen=True, slots=True)
class Flood:
    """The start of a flood, the piece that is repeated until all bytes are sent, and the end."""

    begin: bytes
    piece: bytes
    end: bytes


def _events(_: int) -> Flood:
    """Return short events."""
    return Flood(STREAM_HEAD, chunk(b"".join(_CHAT.tokens(256))), _END)


def _one_event(_: int) -> Flood:
    """Return one endless event."""
    return Flood(STREAM_HEAD + chunk(_EVENT), chunk(b"x" * PIECE_BYTES), chunk(_REST_OF_EVENT) + _END)


def _short_chunks(_: int) -> Flood:
    """Return events in chunks of one byte."""
    event = _CHAT.tokens(1)[0]
    return Flood(STREAM_HEAD, b"".join(chunk(bytes((byte,))) for byte in event) * 40, _END)


def _answer(size: int) -> Flood:
    """Return a non-streaming response of a known length."""
    first, last = b'{"object":"list","data":[', b"0]}"
    length = len(first) + -(-size // len(_NUMBERS)) * len(_NUMBERS) + len(last)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    return Flood(head.encode() + first, _NUMBERS, last)


FLOODS: Mapping[str, Callable[[int], Flood]] = {
    "events": _events,
    "one_event": _one_event,
    "short_chunks": _short_chunks,
    "answer": _answer,
}
"""Name -> content of a flood for a number of bytes."""
