"""What Envoy is told, as bytes: answers that never change are made once.

Header values go out as `raw_value`, the field that Envoy reads. Every header that is set replaces whatever the client
sent under its name, and so does the destination: a client cannot name one. The messages and the numbers of their fields
are those of extproc.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from router.gateway.hints import DESTINATION, DROPPED, LB
from router.gateway.wire import field, flag, tag, varint, within

CHUNK_BYTES_MAX = 62_000  # bytes of a body in one answer of full duplex: Envoy takes 64 KB at most

Header = tuple[bytes, bytes]  # lower-case name, value

# Fields of ProcessingResponse.
_REQUEST_HEADERS, _RESPONSE_HEADERS, _REQUEST_BODY, _RESPONSE_BODY, _REQUEST_TRAILERS, _RESPONSE_TRAILERS = map(
    tag, range(1, 7)
)
_IMMEDIATE, _DYNAMIC_METADATA, _MODE_OVERRIDE = map(tag, range(7, 10))
_COMMON = tag(1)  # HeadersResponse and BodyResponse have a CommonResponse under this tag
_HEADER_MUTATION, _BODY_MUTATION = tag(2), tag(3)  # tags in a CommonResponse
_SET, _REMOVE = tag(1), tag(2)  # tags in a HeaderMutation
_OPTION, _OVERWRITE = tag(1), flag(3, 2)  # tags in a HeaderValueOption; the action is OVERWRITE_IF_EXISTS_OR_ADD
_KEY, _RAW_VALUE = tag(1), tag(3)  # of HeaderValue
_BODY, _CLEAR, _STREAMED = tag(1), flag(2), tag(3)  # of BodyMutation
_END = flag(2)  # of StreamedBodyResponse, whose body is field 1 as well
_STATUS, _HEADERS, _IMMEDIATE_BODY, _DETAILS = tag(1), tag(2), tag(3), tag(5)  # of ImmediateResponse
_CODE = bytes((1 << 3,))  # of HttpStatus, a number of any size
_SHOWS_BODY = field(_MODE_OVERRIDE, flag(4, 1))  # response_body_mode: STREAMED

CONTINUE_HEADERS = within((_REQUEST_HEADERS, _COMMON), ())
CONTINUE_BODY = within((_REQUEST_BODY, _COMMON), ())
CONTINUE_TRAILERS = within((_REQUEST_TRAILERS,), ())
PASS_HEAD = within((_RESPONSE_HEADERS, _COMMON), ())
PASS_BODY = within((_RESPONSE_BODY, _COMMON), ())
PASS_TRAILERS = within((_RESPONSE_TRAILERS,), ())


def to_engine(destination: bytes, set_: Iterable[Header], removed: Iterable[bytes]) -> bytes:
    """What becomes of a request's head, a CommonResponse: where it goes, headers that are set, and headers that are
    removed."""
    return within((_HEADER_MUTATION,), [_goes_to(destination), *_mutation(set_, removed)])


def with_headers(common: bytes, destination: bytes) -> bytes:
    """The answer to a request's head, with the destination in the metadata, too."""
    return within((_REQUEST_HEADERS, _COMMON), (common,), _located(destination))


def with_body(common: bytes, destination: bytes, body: bytes | None) -> bytes:
    """The answer to a request's whole body, which is replaced by `body` unless that is None."""
    pieces = [common]
    if body is not None:
        new = _BODY + varint(len(body))
        pieces += (_BODY_MUTATION + varint(len(new) + len(body)), new, body)
    return within((_REQUEST_BODY, _COMMON), pieces, _located(destination))


def request_pieces(body: bytes, *, end: bool) -> Iterator[bytes]:
    """A request's body in pieces, for full duplex. `end`: its last piece is the end of the request."""
    for at in range(0, max(1, len(body)), CHUNK_BYTES_MAX):
        last = at + CHUNK_BYTES_MAX >= len(body)
        yield _piece(_REQUEST_BODY, body[at : at + CHUNK_BYTES_MAX], end=end and last)


def to_client(set_: Sequence[Header], removed: Sequence[bytes], *, streamed: bool = False) -> bytes:
    """The answer to the head of an engine's answer. `streamed`: its body is to come here as well, where the gateway
    lets itself be told so."""
    if not set_ and not removed and not streamed:
        return PASS_HEAD
    shows = _SHOWS_BODY if streamed else b""
    return within((_RESPONSE_HEADERS, _COMMON, _HEADER_MUTATION), _mutation(set_, removed), shows)


def answer_piece(body: bytes, *, end: bool, duplex: bool) -> bytes:
    """A piece of an answer's body in place of the one that came."""
    if duplex:
        return _piece(_RESPONSE_BODY, body, end=end)
    change = field(_BODY, body) if body else _CLEAR
    return within((_RESPONSE_BODY, _COMMON, _BODY_MUTATION), (change,))


def immediate(status: int, lines: Iterable[bytes], body: bytes, code: str) -> bytes:
    """An answer of our own, which Envoy gives at once. `lines` are header lines; `code` says why there is no other."""
    set_ = list[Header]()
    for line in lines:
        name, _, value = line.partition(b":")
        set_.append((name.lower(), value.strip()))
    if code:
        set_.append((DROPPED.encode(), code.encode()))
    said = [field(_STATUS, _CODE + varint(status)), within((_HEADERS,), _mutation(set_, ()))]
    if body:
        said.append(field(_IMMEDIATE_BODY, body))
    if code:
        said.append(field(_DETAILS, code.encode()))
    return within((_IMMEDIATE,), said)


def _piece(whose: bytes, body: bytes, *, end: bool) -> bytes:
    """A piece of a body in full duplex."""
    pieces = [_BODY + varint(len(body)), body] if body else []
    if end:
        pieces.append(_END)
    return within((whose, _COMMON, _BODY_MUTATION, _STREAMED), pieces)


def _mutation(set_: Iterable[Header], removed: Iterable[bytes]) -> list[bytes]:
    """Fields of a HeaderMutation."""
    fields = [_set(name, value) for name, value in set_]
    for name in removed:
        fields.append(field(_REMOVE, name))
    return fields


def _set(name: bytes, value: bytes) -> bytes:
    """One header that is set."""
    pair = b"".join((_KEY, varint(len(name)), name, _RAW_VALUE, varint(len(value)), value))
    size = varint(len(pair))
    return b"".join(
        (_SET, varint(len(_OPTION) + len(size) + len(pair) + len(_OVERWRITE)), _OPTION, size, pair, _OVERWRITE)
    )


@lru_cache(1_024)
def _goes_to(destination: bytes) -> bytes:
    """The header that names the endpoints."""
    return _set(DESTINATION.encode(), destination)


@lru_cache(1_024)
def _located(destination: bytes) -> bytes:
    """The metadata that name the endpoints: a google.protobuf.Struct in one."""
    fields, key, value = tag(1), tag(1), tag(2)  # of Struct, and of an entry of its map
    text, struct = tag(3), tag(5)  # of Value
    inner = field(key, DESTINATION.encode()) + field(value, field(text, destination))
    outer = field(key, LB.encode()) + field(value, within((struct, fields), (inner,)))
    return within((_DYNAMIC_METADATA, fields), (outer,))
