"""Encoders for the responses to Envoy. Constant responses are encoded once.

Header values are sent as `raw_value`, the field that Envoy reads. Every header that is set replaces the client's values
of that name. This includes the destination, so a client cannot choose one. The messages and their field numbers are
those of extproc.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from router.extproc.metadata import DESTINATION, DROPPED, LB
from router.extproc.protobuf import bool_field, field, nested_message, tag, varint

CHUNK_BYTES_MAX = 62_000  # bytes of a body in one response of full duplex: Envoy accepts at most 64 KB

Header = tuple[bytes, bytes]  # lower-case name, value

# Fields of ProcessingResponse.
_REQUEST_HEADERS, _RESPONSE_HEADERS, _REQUEST_BODY, _RESPONSE_BODY, _REQUEST_TRAILERS, _RESPONSE_TRAILERS = map(
    tag, range(1, 7)
)
_IMMEDIATE, _DYNAMIC_METADATA, _MODE_OVERRIDE = map(tag, range(7, 10))
_COMMON = tag(1)  # HeadersResponse and BodyResponse have a CommonResponse under this tag
_HEADER_MUTATION, _BODY_MUTATION = tag(2), tag(3)  # tags in a CommonResponse
_SET, _REMOVE = tag(1), tag(2)  # tags in a HeaderMutation
_OPTION, _OVERWRITE = tag(1), bool_field(3, 2)  # tags in a HeaderValueOption; the action is OVERWRITE_IF_EXISTS_OR_ADD
_KEY, _RAW_VALUE = tag(1), tag(3)  # tags in a HeaderValue
_BODY, _CLEAR, _STREAMED = tag(1), bool_field(2), tag(3)  # tags in a BodyMutation
_END = bool_field(2)  # field of a StreamedBodyResponse; its body is field 1 as well
_STATUS, _HEADERS, _IMMEDIATE_BODY, _DETAILS = tag(1), tag(2), tag(3), tag(5)  # tags in an ImmediateResponse
_CODE = bytes((1 << 3,))  # tag in an HttpStatus, a number of any size
_SHOWS_BODY = field(_MODE_OVERRIDE, bool_field(4, 1))  # response_body_mode: STREAMED

CONTINUE_HEADERS = nested_message((_REQUEST_HEADERS, _COMMON), ())
CONTINUE_BODY = nested_message((_REQUEST_BODY, _COMMON), ())
CONTINUE_TRAILERS = nested_message((_REQUEST_TRAILERS,), ())
PASS_HEAD = nested_message((_RESPONSE_HEADERS, _COMMON), ())
PASS_BODY = nested_message((_RESPONSE_BODY, _COMMON), ())
PASS_TRAILERS = nested_message((_RESPONSE_TRAILERS,), ())


def to_engine(destination: bytes, set_: Iterable[Header], removed: Iterable[bytes]) -> bytes:
    """Encode the CommonResponse of a request's head: its destination, headers to set, and headers to remove."""
    return nested_message((_HEADER_MUTATION,), [_goes_to(destination), *_mutation(set_, removed)])


def encode_headers_response(common: bytes, destination: bytes) -> bytes:
    """Encode the response to a request's head, which also has the destination in its metadata."""
    return nested_message((_REQUEST_HEADERS, _COMMON), (common,), _encode_destination(destination))


def encode_body_response(common: bytes, destination: bytes, body: bytes | None) -> bytes:
    """Encode the response to a request's whole body, which is replaced by `body` unless that is None."""
    pieces = [common]
    if body is not None:
        new = _BODY + varint(len(body))
        pieces += (_BODY_MUTATION + varint(len(new) + len(body)), new, body)
    return nested_message((_REQUEST_BODY, _COMMON), pieces, _encode_destination(destination))


def request_body_chunks(body: bytes, *, end: bool) -> Iterator[bytes]:
    """Encode a request's body in pieces, for full duplex. `end`: its last piece is the end of the request."""
    for at in range(0, max(1, len(body)), CHUNK_BYTES_MAX):
        last = at + CHUNK_BYTES_MAX >= len(body)
        yield _piece(_REQUEST_BODY, body[at : at + CHUNK_BYTES_MAX], end=end and last)


def to_client(set_: Sequence[Header], removed: Sequence[bytes], *, streamed: bool = False) -> bytes:
    """Encode the response to the head of an engine's answer. `streamed`: also request its body, if the gateway allows
    such an override."""
    if not set_ and not removed and not streamed:
        return PASS_HEAD
    shows = _SHOWS_BODY if streamed else b""
    return nested_message((_RESPONSE_HEADERS, _COMMON, _HEADER_MUTATION), _mutation(set_, removed), shows)


def response_body_chunk(body: bytes, *, end: bool, duplex: bool) -> bytes:
    """Encode a replacement of a piece of an answer's body."""
    if duplex:
        return _piece(_RESPONSE_BODY, body, end=end)
    change = field(_BODY, body) if body else _CLEAR
    return nested_message((_RESPONSE_BODY, _COMMON, _BODY_MUTATION), (change,))


def immediate_response(status: int, lines: Iterable[bytes], body: bytes, code: str) -> bytes:
    """Encode an answer of the router's own, which Envoy sends at once. `lines` are header lines; `code` is its
    reason."""
    set_ = list[Header]()
    for line in lines:
        name, _, value = line.partition(b":")
        set_.append((name.lower(), value.strip()))
    if code:
        set_.append((DROPPED.encode(), code.encode()))
    said = [field(_STATUS, _CODE + varint(status)), nested_message((_HEADERS,), _mutation(set_, ()))]
    if body:
        said.append(field(_IMMEDIATE_BODY, body))
    if code:
        said.append(field(_DETAILS, code.encode()))
    return nested_message((_IMMEDIATE,), said)


def _piece(whose: bytes, body: bytes, *, end: bool) -> bytes:
    """Encode a piece of a body in full duplex."""
    pieces = [_BODY + varint(len(body)), body] if body else []
    if end:
        pieces.append(_END)
    return nested_message((whose, _COMMON, _BODY_MUTATION, _STREAMED), pieces)


def _mutation(set_: Iterable[Header], removed: Iterable[bytes]) -> list[bytes]:
    """Return the fields of a HeaderMutation."""
    fields = [_set(name, value) for name, value in set_]
    for name in removed:
        fields.append(field(_REMOVE, name))
    return fields


def _set(name: bytes, value: bytes) -> bytes:
    """Encode one header to set."""
    pair = b"".join((_KEY, varint(len(name)), name, _RAW_VALUE, varint(len(value)), value))
    size = varint(len(pair))
    return b"".join(
        (_SET, varint(len(_OPTION) + len(size) + len(pair) + len(_OVERWRITE)), _OPTION, size, pair, _OVERWRITE)
    )


@lru_cache(1_024)
def _goes_to(destination: bytes) -> bytes:
    """Encode the header that lists the endpoints."""
    return _set(DESTINATION.encode(), destination)


@lru_cache(1_024)
def _encode_destination(destination: bytes) -> bytes:
    """Encode the metadata that list the endpoints: a google.protobuf.Struct in another one."""
    fields, key, value = tag(1), tag(1), tag(2)  # tags in a Struct, and in an entry of its map
    text, struct = tag(3), tag(5)  # tags in a Value
    inner = field(key, DESTINATION.encode()) + field(value, field(text, destination))
    outer = field(key, LB.encode()) + field(value, nested_message((struct, fields), (inner,)))
    return nested_message((_DYNAMIC_METADATA, fields), (outer,))
