"""Answers to Envoy, as it parses them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.extproc import extproc_pb2 as pb
from router.extproc import processing_responses
from router.extproc.metadata import DESTINATION, DROPPED, LB

NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=200).map(str.encode)
VALUES = st.binary(max_size=300)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=5)
BODIES = st.one_of(
    st.none(), st.binary(max_size=20), st.integers(0, 3 * processing_responses.CHUNK_BYTES_MAX).map(bytes)
)
PLACES = st.lists(st.integers(1, 65_535).map("10.0.0.1:{}".format), min_size=1, max_size=20).map(",".join)
OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def mutated(mutation: pb.HeaderMutation, set_: list[tuple[bytes, bytes]], removed: list[bytes]) -> None:
    """Put these headers into a message."""
    for name, value in set_:
        mutation.set_headers.add(header=pb.HeaderValue(key=name.decode(), raw_value=value), append_action=OVERWRITE)
    mutation.remove_headers.extend(name.decode() for name in removed)


@given(HEADERS, st.lists(NAMES, max_size=3), BODIES, PLACES)
def test_where_a_request_goes(
    set_: list[tuple[bytes, bytes]], removed: list[bytes], body: bytes | None, to: str
) -> None:
    """The answer to a head, and to a whole body that may be replaced: destination as a header and as metadata, headers
    set and removed."""
    common = pb.CommonResponse()
    mutated(common.header_mutation, [(DESTINATION.encode(), to.encode()), *set_], removed)
    headed = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
    headed.dynamic_metadata.fields[LB].struct_value.fields[DESTINATION].string_value = to
    assert pb.ProcessingResponse.FromString(processing_responses.headers_response(to, set_, removed)) == headed
    if body is not None:
        common.body_mutation.body = body
    whole = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
    whole.dynamic_metadata.CopyFrom(headed.dynamic_metadata)
    assert pb.ProcessingResponse.FromString(processing_responses.body_response(to, set_, removed, body)) == whole


@given(HEADERS, st.lists(NAMES, max_size=3), st.booleans())
def test_what_becomes_of_an_answers_head(set_: list[tuple[bytes, bytes]], removed: list[bytes], streamed: bool) -> None:
    """Headers set and removed, and the wish to see its body."""
    wanted = pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=pb.CommonResponse()))
    if set_ or removed or streamed:
        wanted.response_headers.response.header_mutation.SetInParent()
        mutated(wanted.response_headers.response.header_mutation, set_, removed)
    if streamed:
        wanted.mode_override.response_body_mode = pb.ProcessingMode.STREAMED
    assert pb.ProcessingResponse.FromString(processing_responses.to_client(set_, removed, streamed=streamed)) == wanted


@given(st.binary(max_size=200_000), st.booleans())
def test_a_body_in_pieces(body: bytes, end: bool) -> None:
    """Together they are the body, none is longer than Envoy takes, and only the last one may be the end."""
    pieces = [
        pb.ProcessingResponse.FromString(piece) for piece in processing_responses.request_body_chunks(body, end=end)
    ]
    said = [piece.request_body.response.body_mutation.streamed_response for piece in pieces]
    assert b"".join(each.body for each in said) == body
    assert all(len(each.body) <= processing_responses.CHUNK_BYTES_MAX for each in said)
    assert [each.end_of_stream for each in said] == [False] * (len(said) - 1) + [end]


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_a_piece_of_an_answer(body: bytes, end: bool, duplex: bool) -> None:
    """In place of the one that came; an empty one is cleared, but in full duplex."""
    common = pb.CommonResponse()
    if duplex:
        common.body_mutation.streamed_response.SetInParent()
        common.body_mutation.streamed_response.body = body
        common.body_mutation.streamed_response.end_of_stream = end
    elif body:
        common.body_mutation.body = body
    else:
        common.body_mutation.clear_body = True
    wanted = pb.ProcessingResponse(response_body=pb.BodyResponse(response=common))
    assert (
        pb.ProcessingResponse.FromString(processing_responses.response_body_chunk(body, end=end, duplex=duplex))
        == wanted
    )


@given(st.integers(200, 599), HEADERS, st.binary(max_size=300), st.sampled_from(["", "no_replica_ready"]))
def test_an_answer_of_our_own(status: int, set_: list[tuple[bytes, bytes]], body: bytes, code: str) -> None:
    """Status, headers, body, and why there is no other, as details and as llm-d's header."""
    stripped = [(name, value.strip()) for name, value in set_]
    wanted = pb.ProcessingResponse()
    said = wanted.immediate_response
    said.status.code, said.body, said.details = status, body, code
    mutated(said.headers, [*stripped, *([(DROPPED.encode(), code.encode())] if code else [])], [])
    if not said.HasField("headers"):
        said.headers.SetInParent()
    lines = [name.title() + b": " + value + b"\r\n" for name, value in set_]
    assert (
        pb.ProcessingResponse.FromString(processing_responses.immediate_response(status, lines, body, code)) == wanted
    )


def test_constant_answers() -> None:
    """Each says which message it answers, and changes nothing."""
    kinds = {
        processing_responses.CONTINUE_HEADERS: "request_headers",
        processing_responses.CONTINUE_BODY: "request_body",
        processing_responses.CONTINUE_TRAILERS: "request_trailers",
        processing_responses.PASS_HEAD: "response_headers",
        processing_responses.PASS_BODY: "response_body",
        processing_responses.PASS_TRAILERS: "response_trailers",
    }
    for answer, kind in kinds.items():
        message = pb.ProcessingResponse.FromString(answer)
        assert message.WhichOneof("response") == kind
        assert message.ByteSize() == len(answer) <= 4
