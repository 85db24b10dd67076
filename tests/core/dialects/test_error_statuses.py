"""Whose fault an error is that comes inside an answer of status 200."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from router.core.dialects import ANTHROPIC, OPENAI, RESPONSES, SGLANG, Dialect, errors
from router.core.types.placements import EndReason
from tests.support.examples import examples
from tests.support.fakes import events, generate_events, message_events, response_events

TOO_LONG = "context_length_exceeded"


def status_of(**fields: object) -> int:
    """Of an error object with these fields."""
    return errors.status_of_raw(Raw(json.dumps(fields).encode()))


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (400, {"code": 400}),
        (400, {"code": "400"}),
        (422, {"code": None, "type": "422"}),
        (400, {"code": TOO_LONG, "type": "invalid_request_error"}),
        (400, {"code": TOO_LONG}),
        (400, {"code": None, "type": "BadRequestError"}),
        (400, {"type": "BAD_REQUEST"}),
        (400, {"type": "Bad Request", "code": 0}),
        (400, {"type": "VLLMValidationError"}),
        (404, {"type": "NotFoundError"}),
        (404, {"code": "model_not_found"}),
        (401, {"type": "authentication_error"}),
        (403, {"type": "permission_error"}),
        (413, {"type": "request_too_large"}),
        (429, {"type": "rate_limit_error", "code": "rate_limit_exceeded"}),
        (400, {"code": "invalid_prompt"}),
        (503, {"type": "overloaded_error"}),
        (503, {"type": "SERVICE_UNAVAILABLE", "code": 503}),
        (500, {"type": "api_error"}),
        (500, {"type": "InternalServerError", "code": "server_error"}),
        (500, {"type": "error"}),
        (500, {"param": "boom"}),
        (500, {"code": 200}),
        (500, {"code": [400], "type": {"a": 1}}),
        (500, {"type": "invalid" * 1_000}),
    ],
)
def test_a_number_decides_and_without_one_the_words(status: int, fields: dict[str, object]) -> None:
    """An error that says nothing of the kind counts as 500."""
    assert status_of(message="x", **fields) == status


@given(raw=st.binary(max_size=80), code=st.text(max_size=20), type_=st.text(max_size=20))
@settings(deadline=None, max_examples=examples(50))
def test_anything_is_some_status(raw: bytes, code: str, type_: str) -> None:
    """Whatever an engine sends, the status is one of an error."""
    assert 400 <= errors.status_of_raw(Raw(raw)) < 600
    assert 400 <= status_of(code=code, type=type_) < 600
    assert errors.says_full(raw) in (True, False)
    assert errors.is_error(raw) in (True, False)


def event(dialect: Dialect, error: dict[str, object]) -> bytes:
    """The error as an event of this dialect."""
    named = b"event: error\n" if dialect in (ANTHROPIC, RESPONSES) else b""
    return named + b"data: " + json.dumps({"type": "error", "error": error}).encode() + b"\n\n"


STREAMS = [
    (OPENAI, events()),
    (ANTHROPIC, message_events()),
    (RESPONSES, response_events()),
    (SGLANG, generate_events()),
]


@pytest.mark.parametrize(("dialect", "whole"), STREAMS)
@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
def test_every_dialect_tells_them_apart(dialect: Dialect, whole: list[bytes], end: bytes) -> None:
    """As the first event, and behind others."""
    for fields, status in (({"code": 400}, 400), ({"type": "BadRequestError"}, 400), ({"code": 500}, 500), ({}, 500)):
        said = event(dialect, {"message": "x", **fields})
        ending = EndReason.FAILED if status >= 500 else EndReason.REFUSED_BY_ENGINE
        assert dialect.event_error(said) == status
        for before in (b"", whole[0], b"".join(whole[:2])):
            assert dialect.find_ending(before + said + end) is ending
        crlf = (whole[0] + said).replace(b"\n", b"\r\n")
        assert dialect.find_ending(crlf) is ending


def test_a_full_queue_in_mid_stream_is_nobodys_failure() -> None:
    """SGLang takes a waiting or running request out again."""
    said = event(OPENAI, {"message": "Request running timeout reached.", "code": 503})
    assert OPENAI.find_ending(events()[0] + said) is EndReason.REFUSED_BY_ENGINE


def named(kind: str, **fields: object) -> bytes:
    """An event of Responses."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (named("response.failed", response={"error": {"code": "invalid_prompt", "message": "x"}}), 400),
        (named("response.failed", response={"error": {"code": "rate_limit_exceeded"}}), 429),
        (named("response.failed", response={"error": {"code": "server_error"}}), 500),
        (named("response.failed", response={"error": None}), 500),
        (named("response.failed", response=None), 500),
        (named("error", code=TOO_LONG, message="x", param=None, sequence_number=3), 400),
        (named("error", code=None, message="x"), 500),
        (named("error", code="x", error={"type": "invalid_request_error", "code": TOO_LONG}), 400),
    ],
)
def test_failed_responses(said: bytes, status: int) -> None:
    """Behind the events that say only that the request has arrived, and with a long answer in the event."""
    ending = EndReason.FAILED if status >= 500 else EndReason.REFUSED_BY_ENGINE
    assert RESPONSES.event_error(said) == status
    assert RESPONSES.find_ending(b"".join(response_events()[:2]) + said) is ending


def test_a_failed_response_that_cannot_be_read_is_a_failure() -> None:
    """Its name alone says so much."""
    assert RESPONSES.find_ending(b'event: response.failed\ndata: {"type\n\n') is EndReason.FAILED


def test_flat_errors_of_sglang() -> None:
    """On OpenAI's paths, too."""
    said = b'data: {"object":"error","message":"too long","type":"BadRequestError","param":null,"code":null}\n\n'
    assert OPENAI.event_error(said) == SGLANG.event_error(said) == 400


def test_an_abort_of_generate_with_a_status() -> None:
    """A stream of `/generate` that ends by an error's status is no whole one."""
    abort = {"type": "abort", "message": "x", "status_code": 400}
    said = b"data: " + json.dumps({"text": "", "meta_info": {"finish_reason": abort}}).encode() + b"\n\n"
    assert SGLANG.find_ending(generate_events()[0] + said + b"data: [DONE]\n\n") is EndReason.REFUSED_BY_ENGINE
    assert SGLANG.find_ending(said.replace(b"400", b"500")) is EndReason.FAILED
    assert SGLANG.find_ending(said.replace(b"400", b"null")) is EndReason.OK
