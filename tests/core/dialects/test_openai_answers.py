from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects.openai import USAGE_BODY_BYTES_MAX, OpenAI
from router.core.prompts.json_fields import USAGE_NAMES_MAX, USAGE_OBJECT_BYTES_MAX
from router.core.types.placements import EndReason, Usage

OPENAI = OpenAI()
COUNTS = {"prompt_tokens": 50, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32}}
DEEP = b"[" * 100_000 + b"]" * 100_000


def event(**fields: Any) -> bytes:
    """One streamed event with these fields."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_usage_of_a_whole_answer() -> None:
    """Counts as the engine reports them; an engine silent on cached tokens is told from one that found none."""
    body = {"choices": [{"message": {"content": '"usage": {"prompt_tokens": 1}'}}], "usage": COUNTS}
    assert OPENAI.usage(json.dumps(body).encode()) == Usage(50, 7, 32)
    assert OPENAI.usage(b'{"usage":{"prompt_tokens":5,"completion_tokens":null}}') == Usage(5, 0, None)
    assert OPENAI.usage(b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":null}}') == Usage(5, 0, None)
    for counts in (b'"prompt_tokens":5,"completion_tokens":%d' % 2**64, b'"prompt_tokens":%d' % 10**30):
        assert OPENAI.usage(b'{"usage":{%b}}' % counts) is None  # sums of such counts could not be kept
    assert OPENAI.usage(b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":0}}}') == Usage(5, 0, 0)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"usage":null}', b'{"usage":{"prompt_tokens":"5"}}', b'{"usage":' + DEEP, b"\xff"]
)
def test_an_answer_without_readable_usage_has_none(body: bytes) -> None:
    """Missing, null, malformed or endless usage is None, never an exception."""
    assert OPENAI.usage(body) is None
    assert OPENAI.stream_usage(b"data: " + body + b"\n\n") is None
    assert not OPENAI.is_usage_event(b"data: " + body)


def test_counts_that_cannot_be_are_mended() -> None:
    """Negative counts are no usage; more cached tokens than prompt tokens are all of them."""
    assert OPENAI.usage(b'{"usage":{"prompt_tokens":-3}}') is None
    odd = {"usage": {"prompt_tokens": 5, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": 99}}}
    assert OPENAI.usage(json.dumps(odd).encode()) == Usage(5, 0, 5)


def test_usage_is_not_looked_for_in_huge_answers() -> None:
    """A body over the limit is not decoded."""
    body = b'{"usage":{"prompt_tokens":5},"x":"' + b" " * USAGE_BODY_BYTES_MAX + b'"}'
    assert OPENAI.usage(body) is None


@given(cut=st.integers(0, 400))
@settings(deadline=None)
def test_usage_from_the_end_of_a_stream(cut: int) -> None:
    """The last usage counts, wherever the tail begins, as long as the usage object is whole in it."""
    early = event(choices=[{"delta": {"content": "x"}}], usage={"prompt_tokens": 50, "completion_tokens": 1})
    last = event(id="x" * 60, choices=[], usage=COUNTS, note="behind")
    stream = early + event(choices=[{"delta": {"content": "usage"}}]) + last + b": bye\n\ndata: [DONE]\n\n"
    usage = OPENAI.stream_usage(stream[cut:])
    assert usage == (Usage(50, 7, 32) if cut <= stream.rindex(b'"usage"') else None)


def test_the_last_usage_is_found_in_a_cut_event() -> None:
    """Behind text that names it and fields that are null; what is longer than any engine's is none."""
    cut = b'oices": [{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}], %b "usage":null, "usage": {'
    usage = b'"usage": {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}},'
    assert OPENAI.usage(cut % usage) == Usage(5, 7, 2)
    assert OPENAI.usage(cut % b"") == Usage(1, 1, None)
    assert OPENAI.usage(cut % usage.replace(b"{", b"{" + b" " * USAGE_OBJECT_BYTES_MAX, 1)) == Usage(1, 1, None)
    assert OPENAI.usage(cut % usage + b'"usage":null,' * USAGE_NAMES_MAX) is None


def test_a_stream_without_usage_has_none() -> None:
    """An engine may send `usage: null` on every other event where the client asked for it once."""
    assert OPENAI.stream_usage(event(choices=[], usage=None) + b"data: [DONE]\n\n") is None
    assert OPENAI.stream_usage(b"") is None


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        (event(error={"message": "EngineCore died", "code": 500}), 500),
        (event(error={"code": 503}).replace(b"\n\n", b"\r\n\r\n") + b"data: [DONE]\r\n\r\n", 503),
        (event(error={"code": 400}) + event(choices=[]), 400),
        (event(error={"code": "server_error"}), 500),
        (event(error={"code": 200}), 500),
        (event(error={}), 500),
        (event(error="boom"), 500),
        (event(error=None, choices=[]), None),
        (event(choices=[{"delta": {"content": 'an "error"'}}]), None),
        (event(choices=[{"delta": {}}]), None),
        (b'data: {"error": {"code": 5', None),
        (b'data: {"error":' + DEEP, None),
        (b'{"error":{"code":500}}', None),
        (b"", None),
    ],
)
def test_an_error_in_the_first_event_is_seen(chunk: bytes, status: int | None) -> None:
    """Status 200 with an error event is the error; healthy, cut and foreign chunks are not."""
    assert OPENAI.event_error(chunk) == status


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","stream":true}',
        b' {"stream" : true , "messages":[{"role":"user","content":"}"}] } \n',
        b'{"stream":true,"stream_options":null}',
        b'{"stream":true,"stream_options":{"continuous_usage_stats":false,"include_usage":false}}',
        b'{"stream":true,"stream_options":"x"}',
    ],
)
def test_asking_for_usage_leaves_every_other_byte(body: bytes) -> None:
    """The option is spliced in before the last brace; what the client wrote stays, and its other options hold."""
    asked = OPENAI.with_usage(body, OPENAI.parse("/v1/chat/completions", body).stream_options)
    end = body.rindex(b"}")
    assert asked.startswith(body[:end])
    assert asked.endswith(body[end:])
    before, after = json.loads(body), json.loads(asked)
    given = before.pop("stream_options", None)
    options = after.pop("stream_options")
    assert after == before
    assert options == {**(given if isinstance(given, dict) else {}), "include_usage": True}
    assert OPENAI.parse("/v1/chat/completions", asked).wants_usage


@pytest.mark.parametrize("ends", [True, False, None])
def test_usage_in_every_event_is_left_to_the_client(ends: bool | None) -> None:
    """SGLang sends it without usage at the end, so a client's options stay as they are."""
    options = {"continuous_usage_stats": True} | ({} if ends is None else {"include_usage": ends})
    body = json.dumps({"stream": True, "stream_options": options}).encode()
    assert OPENAI.parse("/v1/chat/completions", body).wants_usage


def test_usage_beside_choices_was_not_asked_for() -> None:
    """It shows that an engine sends usage to all clients; null, a word in the text and the last event show nothing."""
    assert OPENAI.is_usage_unasked(event(choices=[{"delta": {}}], usage=COUNTS))
    assert not OPENAI.is_usage_unasked(event(choices=[], usage=COUNTS))
    assert not OPENAI.is_usage_unasked(event(choices=[{"delta": {"content": '"usage": {'}}], usage=None))
    assert not OPENAI.is_usage_unasked(event(choices=[{"delta": {}}]))
    assert not OPENAI.is_usage_unasked(b"data: [DONE]\n\n")


def test_the_event_that_was_asked_for_is_known() -> None:
    """Only an event with usage and without choices was asked for on a client's behalf."""
    assert OPENAI.is_usage_event(event(choices=[], usage=COUNTS))
    assert OPENAI.is_usage_event(event(choices=[], usage=COUNTS).replace(b"\n\n", b"\r\n\r\n"))
    assert not OPENAI.is_usage_event(event(choices=[{"delta": {"content": '"usage"'}}], usage=None))
    assert not OPENAI.is_usage_event(event(choices=[{"delta": {}}], usage=COUNTS))
    assert not OPENAI.is_usage_event(event(choices=[], usage=None))
    assert not OPENAI.is_usage_event(event(usage=COUNTS))
    assert not OPENAI.is_usage_event(b"data: [DONE]\n\n")


def test_every_choice_must_finish() -> None:
    """Of several choices none may be cut: one that said something behind which no reason to finish came."""

    def said(index: int, reason: str | None, **delta: object) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    first, second = said(0, "stop"), said(1, "length")
    assert OPENAI.find_ending(first + said(1, None, content="w")) is None
    assert OPENAI.find_ending(said(1, None, content="w") + first) is None
    assert OPENAI.find_ending(said(1, None, content="w") + first + second) is EndReason.OK
    assert OPENAI.find_ending(said(1, None, content="w") + second + first) is EndReason.OK
    assert OPENAI.find_ending(first + second + said(1, None, hidden_states=[0.5])) is EndReason.OK
    assert OPENAI.find_ending(first + said(1, None) + b'data: {"error": {"code": 500}}\n\n') is EndReason.FAILED
    tools = said(0, None, tool_calls=[{"index": 1, "function": {"arguments": "{}"}}])
    assert OPENAI.find_ending(tools + first) is EndReason.OK
