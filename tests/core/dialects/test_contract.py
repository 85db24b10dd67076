"""Every dialect in PATHS keeps the same promises."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.dialects import OPENAI, PATHS, InvalidBody, dialect_of
from router.core.dialects.dialect import Dialect
from router.core.types.placements import EndReason
from tests.support.examples import examples
from tests.support.fakes import events, generate_events, message_events, response_events

ROWS = pytest.mark.parametrize(("path", "dialect"), PATHS.items(), ids=PATHS)
HELLO = "Hello, this is a prompt."


def body_of(path: str, *, stream: bool = False) -> bytes:
    """A smallest request of a path."""
    fields = {"model": "m", "stream": stream}
    if path.endswith("/chat/completions"):
        fields |= {"messages": [{"role": "user", "content": HELLO}]}
    elif path.endswith("/messages"):
        fields |= {"messages": [{"role": "user", "content": HELLO}], "max_tokens": 8}
    elif path == "/generate":
        fields |= {"text": HELLO}
    else:
        fields |= {"input" if path.endswith(("/embeddings", "/responses")) else "prompt": HELLO}
    return json.dumps(fields).encode()


@ROWS
def test_a_request_is_read(path: str, dialect: Dialect) -> None:
    """Model, prompt and stream of the smallest request of each path."""
    ask = dialect.parse(path, body_of(path, stream=True))
    assert (ask.model, ask.stream) == ("m", True)
    assert ask.prompt is not None
    assert HELLO.encode() in ask.prompt.text
    assert 0 < ask.prompt.first_user_end <= len(ask.prompt.text)
    assert not dialect.parse(path, body_of(path)).stream


@ROWS
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\x00", b'{"model": 1}'])
def test_what_is_no_request_is_refused(path: str, dialect: Dialect, body: bytes) -> None:
    """InvalidBody with a stable code and a message for humans, nothing else."""
    with pytest.raises(InvalidBody) as caught:
        dialect.parse(path, body)
    assert caught.value.code.isidentifier()
    assert str(caught.value)


MESSAGES = b'"messages":[{"role":"user","content":"x"}]'
# By path: what a request needs, and fields in which anything may stand.
ANYTHING: dict[str, tuple[bytes, tuple[bytes, ...]]] = {
    "/v1/chat/completions": (MESSAGES, (b'"messages":%b', b'"tools":%b', b'"cache_salt":%b')),
    "/v1/completions": (MESSAGES, (b'"prompt":%b',)),
    "/v1/messages": (
        MESSAGES,
        (b'"messages":%b', b'"system":%b', b'"tools":%b', b'"thinking":%b', b'"output_config":%b', b'"metadata":%b'),
    ),
    "/v1/responses": (
        b'"input":"x"',
        (b'"input":%b', b'"tools":%b', b'"tools":[{"type":"namespace","tools":%b}]', b'"reasoning":%b'),
    ),
}


@pytest.mark.parametrize("path", ANYTHING)
@given(
    part=st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers() | st.just("x"), st.lists).map(repr))
)
@settings(deadline=None, max_examples=examples(60))
def test_no_body_breaks_the_parser(path: str, part: bytes | str) -> None:
    """Whatever stands in a field, the answer is an RequestSpec or InvalidBody."""
    value = part if isinstance(part, bytes) else part.replace("'", '"').replace("None", "null").encode()
    needed, fields = ANYTHING[path]
    for field in fields:
        with suppress(InvalidBody):
            assert PATHS[path].parse(path, b'{"model":"m",%b,%b}' % (needed, field % value)).model == "m"


@ROWS
def test_usage_can_be_asked_for(path: str, dialect: Dialect) -> None:
    """The edited body is the same request, and its stream will carry usage; where it does anyway, nothing is edited."""
    before, after = body_of(path, stream=True), dialect.with_usage(body_of(path, stream=True))
    assert (after == before) is dialect.parse(path, before).wants_usage
    assert dialect.parse(path, after).wants_usage
    assert dialect.parse(path, after).prompt == dialect.parse(path, before).prompt


@ROWS
def test_errors_name_their_code(path: str, dialect: Dialect) -> None:
    """An error body is JSON in which the stable code and the message stand."""
    body = dialect.error(503, "no_replica", "try later")
    assert json.loads(body)
    assert b"no_replica" in body
    assert b"try later" in body


@ROWS
@given(data=st.binary(max_size=200))
@settings(deadline=None, max_examples=examples(30))
def test_no_answer_of_an_engine_breaks_a_dialect(path: str, dialect: Dialect, data: bytes) -> None:
    """Whatever an engine sends, nothing raises, and nothing is found in noise."""
    assert dialect.usage(data) is None
    assert dialect.stream_usage(data) is None
    assert dialect.event_error(data) in (None, *range(400, 600))
    assert dialect.event_error(b'data: {"error":' + data + b"\n\n") in (None, *range(400, 600))
    assert dialect.is_usage_event(data) is False
    assert not dialect.find_abort(data) or b'"abort"' in data


@ROWS
@given(data=st.binary(max_size=200))
@settings(deadline=None, max_examples=examples(30))
def test_every_piece_has_begun_or_not(path: str, dialect: Dialect, data: bytes) -> None:
    """Whether a piece shows that prefill is done is answered for any bytes."""
    assert dialect.has_output(data) in (True, False)


@ROWS
def test_dialects_have_names(path: str, dialect: Dialect) -> None:
    """A dialect has a name, and speaks on its paths and on what lies below them, but not beside."""
    assert dialect.name
    assert dialect_of(path) is dialect_of(path + "/a/b") is dialect
    assert dialect_of(path + "x") is OPENAI


STREAMS = {
    "/v1/chat/completions": events,
    "/v1/completions": events,
    "/v1/embeddings": events,
    "/v1/messages": message_events,
    "/v1/responses": response_events,
    "/generate": generate_events,
}


@ROWS
def test_a_whole_stream_says_so(path: str, dialect: Dialect) -> None:
    """A stream is whole with its last events, and with none fewer; text that looks like an end is text."""
    whole = STREAMS[path]()
    last = len(whole) - dialect.says_done
    assert dialect.find_ending(b"".join(whole)) is dialect.find_ending(b"".join(whole[:last])) is EndReason.OK
    for count in range(last):
        assert dialect.find_ending(b"".join(whole[:count])) is None
    torn = b"".join(whole[:last]).rstrip()[:-3]
    assert dialect.find_ending(torn) is None
    said = json.dumps({"delta": {"content": '"finish_reason":"stop","stop_reason":"x","type":"response.completed"'}})
    assert dialect.find_ending(b"".join(whole[:1]) + f"data: {said}\n\n".encode()) is None


@ROWS
def test_an_error_ends_a_stream(path: str, dialect: Dialect) -> None:
    """What the router says of a broken stream is one event, which the dialect itself takes for an error and an end."""
    begun = STREAMS[path]()[:2]
    event = dialect.error_event(502, "stream_broken", 'it "broke"\noff', b"".join(begun))
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    assert b"stream_broken" in event
    assert dialect.event_error(event) in range(400, 600)
    assert dialect.find_ending(b"".join(begun) + event) is EndReason.FAILED


@ROWS
@given(data=st.binary(max_size=200))
@example(data=b'"finish_reason":"')
@settings(deadline=None, max_examples=examples(30))
def test_noise_ends_nothing(path: str, dialect: Dialect, data: bytes) -> None:
    """Whatever the last bytes are, nothing raises, and noise is no end."""
    assert dialect.find_ending(data) is None
    assert dialect.error_event(504, "stream_stalled", "x", data).endswith(b"\n\n")
