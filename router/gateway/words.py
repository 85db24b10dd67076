"""What Envoy is told, as bytes: answers that never change are made once.

Header values go out as `raw_value`, the field that Envoy reads. Every header that is set replaces whatever the client
sent under its name, and so does the destination: a client cannot name one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.gateway import extproc_pb2 as pb
from router.gateway.hints import DESTINATION, DROPPED, LB

CHUNK_BYTES_MAX = 62_000  # bytes of a body in one answer of full duplex: Envoy takes 64 KB at most
_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

Header = tuple[str, bytes]  # lower-case name, value


def _bytes(response: pb.ProcessingResponse) -> bytes:
    return bytes(response.SerializeToString())


_common = pb.CommonResponse()
CONTINUE_HEADERS = _bytes(pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=_common)))
CONTINUE_BODY = _bytes(pb.ProcessingResponse(request_body=pb.BodyResponse(response=_common)))
CONTINUE_TRAILERS = _bytes(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
PASS_HEAD = _bytes(pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=_common)))
PASS_BODY = _bytes(pb.ProcessingResponse(response_body=pb.BodyResponse(response=_common)))
PASS_TRAILERS = _bytes(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))


def to_engine(destination: str, set_: Iterable[Header], removed: Sequence[str]) -> pb.CommonResponse:
    """What becomes of a request's head: where it goes, headers that are set, and headers that are removed."""
    common = pb.CommonResponse()
    mutation = common.header_mutation
    _set(mutation, DESTINATION, destination.encode())
    for name, value in set_:
        _set(mutation, name, value)
    mutation.remove_headers.extend(removed)
    return common


def with_headers(common: pb.CommonResponse, destination: str) -> bytes:
    """The answer to a request's head, with the destination in the metadata, too."""
    response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
    return _located(response, destination)


def with_body(common: pb.CommonResponse, destination: str, body: bytes | None) -> bytes:
    """The answer to a request's whole body, which is replaced by `body` unless that is None."""
    if body is not None:
        common.body_mutation.body = body
    response = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
    return _located(response, destination)


def request_pieces(body: bytes, *, end: bool) -> Iterable[bytes]:
    """A request's body in pieces, for full duplex. `end`: its last piece is the end of the request."""
    for at in range(0, max(1, len(body)), CHUNK_BYTES_MAX):
        last = at + CHUNK_BYTES_MAX >= len(body)
        piece = pb.StreamedBodyResponse(body=body[at : at + CHUNK_BYTES_MAX], end_of_stream=end and last)
        mutation = pb.BodyMutation(streamed_response=piece)
        common = pb.CommonResponse(body_mutation=mutation)
        yield _bytes(pb.ProcessingResponse(request_body=pb.BodyResponse(response=common)))


def to_client(set_: Sequence[Header], removed: Sequence[str], *, streamed: bool = False) -> bytes:
    """The answer to the head of an engine's answer. `streamed`: its body is to come here as well, where the gateway
    lets itself be told so."""
    if not set_ and not removed and not streamed:
        return PASS_HEAD
    response = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    mutation = response.response_headers.response.header_mutation
    for name, value in set_:
        _set(mutation, name, value)
    mutation.remove_headers.extend(removed)
    if streamed:
        response.mode_override.response_body_mode = pb.ProcessingMode.STREAMED
    return _bytes(response)


def answer_piece(body: bytes, *, end: bool, duplex: bool) -> bytes:
    """A piece of an answer's body in place of the one that came."""
    common = pb.CommonResponse()
    if duplex:
        common.body_mutation.streamed_response.body = body
        common.body_mutation.streamed_response.end_of_stream = end
    elif body:
        common.body_mutation.body = body
    else:
        common.body_mutation.clear_body = True
    return _bytes(pb.ProcessingResponse(response_body=pb.BodyResponse(response=common)))


def immediate(status: int, lines: Iterable[bytes], body: bytes, code: str) -> bytes:
    """An answer of our own, which Envoy gives at once. `lines` are header lines; `code` says why there is no other."""
    response = pb.ProcessingResponse()
    said = response.immediate_response
    said.status.code, said.body = status, body
    for line in lines:
        name, _, value = line.partition(b":")
        _set(said.headers, name.decode("latin-1").lower(), value.strip())
    if code:
        said.details = code
        _set(said.headers, DROPPED, code.encode())
    return _bytes(response)


def _located(response: pb.ProcessingResponse, destination: str) -> bytes:
    response.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value = destination
    return _bytes(response)


def _set(mutation: pb.HeaderMutation, name: str, value: bytes) -> None:
    option = mutation.set_headers.add()
    option.append_action = _OVERWRITE
    option.header.key, option.header.raw_value = name, value
