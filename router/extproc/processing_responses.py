"""Encoders for the responses to Envoy. Constant responses are encoded once.

Header values are sent as `raw_value`, the field that Envoy reads. Every header that is set replaces the client's values
of that name. This includes the destination, so a client cannot choose one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from router.extproc import extproc_pb2 as pb
from router.extproc.metadata import DESTINATION, DROPPED, LB

CHUNK_BYTES_MAX = 62_000  # bytes of a body in one response of full duplex: Envoy accepts at most 64 KB

Header = tuple[bytes, bytes]  # lower-case name, value

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _encode(response: pb.ProcessingResponse) -> bytes:
    encoded: bytes = response.SerializeToString()
    return encoded


_HEADERS, _BODY = pb.HeadersResponse(response=pb.CommonResponse()), pb.BodyResponse(response=pb.CommonResponse())
CONTINUE_HEADERS = _encode(pb.ProcessingResponse(request_headers=_HEADERS))
CONTINUE_BODY = _encode(pb.ProcessingResponse(request_body=_BODY))
CONTINUE_TRAILERS = _encode(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
PASS_HEAD = _encode(pb.ProcessingResponse(response_headers=_HEADERS))
PASS_BODY = _encode(pb.ProcessingResponse(response_body=_BODY))
PASS_TRAILERS = _encode(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))


def headers_response(destination: str, set_: Iterable[Header], removed: Iterable[bytes]) -> bytes:
    """Encode the response to a request's head: its destination, headers to set, and headers to remove."""
    response = pb.ProcessingResponse()
    _send_to(response, response.request_headers.response, destination, set_, removed)
    return _encode(response)


def body_response(destination: str, set_: Iterable[Header], removed: Iterable[bytes], body: bytes | None) -> bytes:
    """Encode the response to a request's whole body, which is replaced by `body` unless that is None."""
    response = pb.ProcessingResponse()
    common = response.request_body.response
    _send_to(response, common, destination, set_, removed)
    if body is not None:
        common.body_mutation.body = body
    return _encode(response)


def request_body_chunks(body: bytes, *, end: bool) -> Iterator[bytes]:
    """Encode a request's body in pieces, for full duplex. `end`: its last piece is the end of the request."""
    for at in range(0, max(1, len(body)), CHUNK_BYTES_MAX):
        response = pb.ProcessingResponse()
        piece = response.request_body.response.body_mutation.streamed_response
        piece.body = body[at : at + CHUNK_BYTES_MAX]
        piece.end_of_stream = end and at + CHUNK_BYTES_MAX >= len(body)
        yield _encode(response)


def to_client(set_: Sequence[Header], removed: Sequence[bytes], *, streamed: bool = False) -> bytes:
    """Encode the response to the head of an engine's answer. `streamed`: also request its body, if the gateway allows
    such an override."""
    if not set_ and not removed and not streamed:
        return PASS_HEAD
    response = pb.ProcessingResponse()
    mutation = response.response_headers.response.header_mutation
    mutation.SetInParent()
    _mutate(mutation, set_, removed)
    if streamed:
        response.mode_override.response_body_mode = pb.ProcessingMode.STREAMED
    return _encode(response)


def response_body_chunk(body: bytes, *, end: bool, duplex: bool) -> bytes:
    """Encode a replacement of a piece of an answer's body."""
    response = pb.ProcessingResponse()
    mutation = response.response_body.response.body_mutation
    if duplex:
        mutation.streamed_response.SetInParent()
        mutation.streamed_response.body = body
        mutation.streamed_response.end_of_stream = end
    elif body:
        mutation.body = body
    else:
        mutation.clear_body = True
    return _encode(response)


def immediate_response(status: int, lines: Iterable[bytes], body: bytes, code: str) -> bytes:
    """Encode an answer of the router's own, which Envoy sends at once. `lines` are header lines; `code` is its
    reason."""
    set_ = list[Header]()
    for line in lines:
        name, _, value = line.partition(b":")
        set_.append((name.lower(), value.strip()))
    if code:
        set_.append((DROPPED.encode(), code.encode()))
    response = pb.ProcessingResponse()
    answer = response.immediate_response
    answer.status.code, answer.body, answer.details = status, body, code
    answer.headers.SetInParent()
    _mutate(answer.headers, set_, ())
    return _encode(response)


def _send_to(
    response: pb.ProcessingResponse,
    common: pb.CommonResponse,
    destination: str,
    set_: Iterable[Header],
    removed: Iterable[bytes],
) -> None:
    """Set the destination as a header and in the metadata, and the changes of headers."""
    _mutate(common.header_mutation, [(DESTINATION.encode(), destination.encode()), *set_], removed)
    response.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value = destination


def _mutate(mutation: pb.HeaderMutation, set_: Iterable[Header], removed: Iterable[bytes]) -> None:
    for name, value in set_:
        option = mutation.set_headers.add()
        option.header.key = name.decode()
        option.header.raw_value = value
        option.append_action = _OVERWRITE
    mutation.remove_headers.extend([name.decode() for name in removed])
