"""What answers say of themselves, in every dialect."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.dialects.response_metadata import (
    BODY_BYTES_MAX,
    NAME_CHARS_MAX,
    REASONS_MAX,
    ResponseMetadata,
    metadata_of,
    metadata_of_stream,
)
from tests.support.fakes import (
    GENERATED,
    MESSAGE,
    RESPONSE,
    generate_events,
    message_events,
    response_events,
)

CHOICES = [{"index": 1, "finish_reason": "length"}, {"index": 0, "finish_reason": "stop"}]
CHAT = {"id": "chatcmpl-7", "model": "m", "choices": CHOICES}


def chunk(index: int, reason: str | None) -> bytes:
    """An event of a chat's stream."""
    choice = {"index": index, "delta": {}, "finish_reason": reason}
    return b"data: %b\n\n" % json.dumps({"id": "chatcmpl-7", "model": "m", "choices": [choice]}).encode()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (CHAT, ResponseMetadata("m", "chatcmpl-7", ("stop", "length"))),
        (MESSAGE, ResponseMetadata("m", "chatcmpl-1", ("end_turn",))),
        (RESPONSE, ResponseMetadata("m", "x", ("completed",), 0, 0)),
        ({**RESPONSE, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
         ResponseMetadata("m", "x", ("max_output_tokens",), 0, 0)),
        ({**CHAT, "usage": {"completion_tokens_details": {"reasoning_tokens": 7}}},
         ResponseMetadata("m", "chatcmpl-7", ("stop", "length"), 7)),
        ({**CHAT, "usage": {"reasoning_tokens": 5, "prompt_tokens_details": {"cache_write_tokens": 9}}},
         ResponseMetadata("m", "chatcmpl-7", ("stop", "length"), 5, 9)),
        ({**MESSAGE, "usage": {"cache_creation_input_tokens": 64, "output_tokens_details": []}},
         ResponseMetadata("m", "chatcmpl-1", ("end_turn",), None, 64)),
        ({**CHAT, "usage": {"reasoning_tokens": -1, "cache_creation_input_tokens": "many"}},
         ResponseMetadata("m", "chatcmpl-7", ("stop", "length"))),
        (GENERATED, ResponseMetadata("", "x", ("stop",))),
        ({"id": "embd-1", "model": "m", "data": []}, ResponseMetadata("m", "embd-1")),
        ({"id": 7, "model": ["m"], "choices": "none", "status": {}}, ResponseMetadata()),
        ({"model": "m" * (NAME_CHARS_MAX + 1), "id": "a\nb"}, ResponseMetadata()),
    ],
)  # fmt: skip
def test_a_whole_answer(body: dict, told: ResponseMetadata) -> None:
    """Model, id, and a reason for each choice in their order; what is of another form, or too long, is left out."""
    assert metadata_of(json.dumps(body).encode()) == told


def test_long_answers_are_not_read() -> None:
    """Decoding may not hold the event loop up."""
    body = json.dumps({"model": "m", "data": "0" * BODY_BYTES_MAX}).encode()
    assert metadata_of(body) == ResponseMetadata()


def test_streams() -> None:
    """The first event names the model and the id, the last events have the reasons."""
    chat = [chunk(0, None), chunk(1, "length"), chunk(0, "stop"), b"data: [DONE]\n\n"]
    assert metadata_of_stream(chat[0], b"".join(chat[1:])) == ResponseMetadata("m", "chatcmpl-7", ("stop", "length"))
    messages = message_events()
    assert metadata_of_stream(messages[0], b"".join(messages[2:])) == ResponseMetadata("m", "chatcmpl-1", ("end_turn",))
    responses = response_events()
    assert metadata_of_stream(responses[0], b"".join(responses[1:])) == ResponseMetadata("m", "x", ("completed",), 0, 0)
    generated = generate_events()
    assert metadata_of_stream(generated[0], b"".join(generated[1:])) == ResponseMetadata("", "x", ("stop",))


def test_a_stream_that_broke_off_has_no_reason() -> None:
    """What has not ended has none."""
    assert metadata_of_stream(chunk(0, None), chunk(0, None)) == ResponseMetadata("m", "chatcmpl-7")


def test_reasons_are_few() -> None:
    """An answer of very many choices does not make a span of any size."""
    choices = [{"index": index, "finish_reason": "stop"} for index in range(2 * REASONS_MAX)]
    assert len(metadata_of(json.dumps({"choices": choices}).encode()).reasons) == REASONS_MAX


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_anything_may_come(head: bytes, tail: bytes) -> None:
    """Bytes of any kind are read without an error."""
    metadata_of(head)
    metadata_of_stream(b'data: {"choices":' + head, tail + b'data: {"finish_reason":"')
